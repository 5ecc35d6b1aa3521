// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/broadcasts.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/plan.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/agreement/call_protocol.h"
#include "zero/agreement/shard_domains.h"
#include "zero/memory/buffer_pool.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;

// The value of everything that a rank has before it receives something.
at::Tensor of_rank(int rank, at::IntArrayRef shape, c10::ScalarType dtype) {
  return at::full(shape, rank + 1, dtype);
}

bool is_of_rank(const at::Tensor& tensor, int rank) {
  return at::equal(tensor.detach(), of_rank(rank, tensor.sizes(), tensor.scalar_type()));
}

// One rank with two parameter groups of one parameter each.
struct Rank {
  Rank(const Group& home, const ZeroOptions& options)
      : domains(make_domains(home, options, 2)),
        model(Tensors{of_rank(domains.mesh.rank(), {3, 5}, at::kFloat),
                      of_rank(domains.mesh.rank(), {7}, at::kBFloat16)}),
        table(model, {torch::optim::OptimizerParamGroup(Tensors{model.values[0]}),
                      torch::optim::OptimizerParamGroup(Tensors{model.values[1]})}),
        plan(plan_of(table, domains, options)),
        arena(plan, table, pool),
        comms(domains.mesh),
        broadcasts(arena, comms) {
    comms.connect(domains);
  }
  static Plan plan_of(const ParameterTable& table, const ShardDomains& domains,
                      const ZeroOptions& options) {
    std::vector<ParameterInfo> infos;
    for (const Parameter& p : table.parameters()) {
      infos.push_back({p.tensor.numel(), p.tensor.scalar_type(), domains.of_group[p.group]});
    }
    std::vector<int64_t> world_sizes;
    for (const ShardDomain& d : domains.list) world_sizes.push_back(d.group.world_size());
    return make_plan(infos, world_sizes, {options.layout(), 256});
  }
  int rank() const { return domains.mesh.rank(); }
  // Whether parameter p has the values that this rank of the mesh had.
  bool has_values_of(int64_t p, int rank) const { return is_of_rank(model.values[p], rank); }
  // Sends one tensor over the home group.
  void send(const at::Tensor& tensor) { broadcasts.over_home({{"tensor", tensor}}, "buffers"); }
  int64_t messages() const { return comms.data_traffic().small_calls; }

  const ShardDomains domains;
  GivenGradients model;
  ParameterTable table;
  Plan plan;
  BufferPool pool{at::kCPU, 1 << 20};
  WorkingArena arena;
  OptimizerCommunicators comms;
  Broadcasts broadcasts;
};

using MakeRank = std::function<std::unique_ptr<Rank>(const Group& all)>;

// All ranks share both parameter groups.
std::unique_ptr<Rank> plain(const Group& all) { return std::make_unique<Rank>(all, ZeroOptions()); }

void on_ranks(int world_size, const MakeRank& make, const std::function<void(Rank&)>& body,
              std::shared_ptr<MemoryNetwork> network = nullptr) {
  run_ranks(world_size, [&](const Group& group) { body(*make(group)); },
            {.timeout = std::chrono::seconds(60), .network = std::move(network)});
}

Group half_of(const Group& all) {
  const int first = all.rank() / 2 * 2;
  return all.subgroup({first, first + 1}, "half");
}

TEST(BroadcastsTest, AllRanksGetTheParametersOfRank0) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    for (const int world_size : {1, 2, 3, 5}) {
      on_ranks(
          world_size,
          [&](const Group& all) {
            return std::make_unique<Rank>(all, ZeroOptions().layout(layout));
          },
          [](Rank& r) {
            r.broadcasts.parameters();
            EXPECT_TRUE(r.has_values_of(0, 0)) << r.rank();
            EXPECT_TRUE(r.has_values_of(1, 0)) << r.rank();
          });
    }
  }
}

TEST(BroadcastsTest, ParametersAreSentWithinTheirDomainAndTheRestOverHome) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    for (const int64_t shared_by_half : {0, 1}) {
      on_ranks(
          4,
          [&](const Group& all) {
            const GroupPlacement half = GroupPlacement().sharded_over(half_of(all));
            return std::make_unique<Rank>(
                all, ZeroOptions().layout(layout).placement(shared_by_half, half));
          },
          [&](Rank& r) {
            r.broadcasts.parameters();
            EXPECT_TRUE(r.has_values_of(shared_by_half, r.rank() / 2 * 2)) << r.rank();
            EXPECT_TRUE(r.has_values_of(1 - shared_by_half, 0)) << r.rank();
            const at::Tensor buffer = of_rank(r.rank(), {9}, at::kFloat);
            r.send(buffer);
            EXPECT_TRUE(is_of_rank(buffer, 0)) << r.rank();
          });
    }
  }
}

TEST(BroadcastsTest, ReplicasGetTheSame) {
  on_ranks(
      4,
      [](const Group& all) {
        const int other = (all.rank() + 2) % 4;
        const GroupPlacement replicated = GroupPlacement().replicated_over(
            all.subgroup({std::min(all.rank(), other), std::max(all.rank(), other)}, "replicas"));
        return std::make_unique<Rank>(
            half_of(all),
            ZeroOptions().mesh_group(all).placement(0, replicated).placement(1, replicated));
      },
      [](Rank& r) {
        r.broadcasts.parameters();
        const at::Tensor buffer = of_rank(r.rank(), {9}, at::kFloat);
        r.send(buffer);
        EXPECT_TRUE(is_of_rank(buffer, 0)) << r.rank();
        for (const int64_t p : {0, 1}) EXPECT_TRUE(r.has_values_of(p, 0)) << r.rank();
      });
}

TEST(BroadcastsTest, ReplicasOfAGroupOfOneRankGetTheSame) {
  on_ranks(
      3,
      [](const Group& all) {
        const GroupPlacement replicated = GroupPlacement().replicated_over(all);
        return std::make_unique<Rank>(
            all.subgroup({all.rank()}, "own"),
            ZeroOptions().mesh_group(all).placement(0, replicated).placement(1, replicated));
      },
      [](Rank& r) {
        r.broadcasts.parameters();
        for (const int64_t p : {0, 1}) EXPECT_TRUE(r.has_values_of(p, 0)) << r.rank();
      });
}

TEST(BroadcastsTest, TensorsOfEveryDtypeAndMemoryOrderAreSentBitByBit) {
  on_ranks(2, plain, [](Rank& r) {
    const auto random = [&](int rank) { return random_tensor({6, 4}, 1 + rank) * 100; };
    for (const c10::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt,
                                        at::kLong, at::kByte, at::kBool, at::kComplexFloat}) {
      const at::Tensor dense = random(r.rank()).to(dtype), transposed = dense.t().clone().t();
      const at::Tensor scalar = dense[0][0].clone();
      const at::Tensor all = dense.repeat({1, 2}), part = all.narrow(1, 2, 4);
      const at::Tensor expected = random(0).to(dtype);
      const int64_t before = r.messages();
      r.broadcasts.over_home({{"dense", dense},
                              {"transposed", transposed},
                              {"scalar", scalar},
                              {"part", part},
                              {"empty", at::empty({0, 3}, dtype)}},
                             "buffers");
      EXPECT_EQ(r.messages(), before + 4) << dtype;
      EXPECT_TRUE(at::equal(dense, expected)) << dtype;
      EXPECT_TRUE(at::equal(transposed, expected)) << dtype;
      EXPECT_TRUE(at::equal(scalar, expected[0][0])) << dtype;
      EXPECT_TRUE(at::equal(part, expected.repeat({1, 2}).narrow(1, 2, 4))) << dtype;
      // The rest of the memory that it is a part of is this rank's own.
      EXPECT_TRUE(at::equal(all.narrow(1, 6, 2), random(r.rank()).to(dtype).narrow(1, 2, 2)));
    }
  });
}

TEST(BroadcastsTest, APieceHasAtMostTheBytesThatAnOperationSends) {
  constexpr int64_t kMost = Broadcasts::kBroadcastBytes;
  on_ranks(2, plain, [](Rank& r) {
    for (const int64_t bytes : {kMost, kMost + 1}) {
      const at::Tensor tensor = at::zeros({bytes}, at::kByte);
      if (r.rank() == 0) {
        tensor[0] = 1;
        tensor[kMost - 1] = 2;
        tensor[bytes - 1] = 3;
      }
      const Traffic before = r.comms.data_traffic();
      r.send(tensor);
      const Traffic after = r.comms.data_traffic();
      EXPECT_EQ(after.small_calls - before.small_calls, bytes == kMost ? 1 : 2);
      EXPECT_EQ(after.small_bytes_sent - before.small_bytes_sent, r.rank() == 0 ? bytes : 0);
      EXPECT_EQ(tensor[0].item<int>(), 1);
      EXPECT_EQ(tensor[kMost - 1].item<int>(), bytes == kMost ? 3 : 2);
      EXPECT_EQ(tensor[bytes - 1].item<int>(), 3);
    }
  });
}

TEST(BroadcastsTest, AnErrorNamesWhatWasSent) {
  for (const bool parameters : {true, false}) {
    const auto network = std::make_shared<MemoryNetwork>();
    on_ranks(
        2, plain,
        [&](Rank& r) {
          if (r.rank() == 0) {
            network->kill(0);
            return;
          }
          const std::string text = error_of([&] {
            if (parameters) {
              r.broadcasts.parameters();
            } else {
              r.send(at::zeros({3}));
            }
          });
          expect_words(text, {parameters ? "parameters" : "buffers"});
        },
        network);
  }
}

TEST(BroadcastsTest, ShapesThatDifferAreAnErrorOnAllRanksBeforeTensorsAreSent) {
  const std::vector<NamedTensor> tensors{{"mean", at::zeros({3, 5})}, {"count", at::zeros({})}};
  const std::vector<std::vector<NamedTensor>> others{
      {{"mean", at::zeros({5, 3})}, tensors[1]},
      {{"mean", at::zeros({3, 5}, at::kDouble)}, tensors[1]},
      {{"means", at::zeros({3, 5})}, tensors[1]},
      {tensors[0], {"count", at::zeros({1})}},
      {tensors[0]}};
  on_ranks(3, plain, [&](Rank& r) {
    const std::vector<int64_t> domain_of{0, 0};
    CallProtocol protocol(r.domains, domain_of, r.comms, at::kCPU);
    const auto agree = [&](const std::vector<NamedTensor>& own) {
      return error_of([&] {
        protocol.exchange(Call::kBroadcastBuffers, "", protocol.at_home(shapes_of(own)),
                          {0, false, {0, 0}});
      });
    };
    EXPECT_EQ(agree(tensors), "");
    for (const std::vector<NamedTensor>& other : others) {
      const std::string text = agree(r.rank() == 1 ? other : tensors);
      expect_words(text, {"rank 0", "rank 1", shapes_of(tensors), shapes_of(other)});
    }
  });
}

TEST(BroadcastsTest, ShapesAreListedWithNameAndDtype) {
  EXPECT_EQ(shapes_of({}), "");
  EXPECT_EQ(shapes_of({{"mean", at::zeros({3, 5})}, {"count", at::zeros({}, at::kLong)}}),
            "mean [3, 5] Float, count [] Long");
}

}  // namespace
}  // namespace zero
