// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/replica_check.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "tests/support/reducer_options.h"
#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

struct Rank {
  explicit Rank(const Group& group)
      : rank(group.rank()),
        flat(
            {random_tensor({3, 5}, 1).to(at::kBFloat16), random_tensor({133}, 2).to(at::kBFloat16)},
            group.world_size(), {Layout::kContiguous, 0}),
        arena(flat.plan, flat.table, flat.pool),
        reducer(flat.plan, flat.table, {{&data, nullptr, 0}}, flat.pool,
                reducer_options(flat.plan)),
        shards({flat.plan, flat.table, {rank}, arena, reducer, flat.pool},
               std::make_unique<torch::optim::SGD>(flat.model.values, 0.1), {}),
        control(group.make_communicator("control", Purpose::kControl)) {}

  // Of the parameters that `included` has.
  std::string check(const std::vector<bool>& included = {true, true}) {
    return error_of([&] {
      check_working_parameters(flat.table, shards, rank, *control,
                               [&](int64_t p) { return included[p]; });
    });
  }

  const int rank;
  FlatModel flat;
  WorkingArena arena;
  Communicator data{nullptr, "data", std::chrono::seconds(1)};  // Nothing is sent.
  GradientReducer reducer;
  ShardOptimizer shards;
  const std::unique_ptr<Communicator> control;
};

void on_ranks(int world_size, const std::function<void(Rank&)>& body) {
  run_ranks(world_size, [&](const Group& group) {
    Rank rank(group);
    body(rank);
  });
}

TEST(ReplicaCheckTest, EqualRanksPassWithOneMessage) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [](Rank& r) {
      EXPECT_EQ(r.check(), "");
      EXPECT_LE(r.control->traffic().small_calls, 1);
    });
  }
}

TEST(ReplicaCheckTest, ValuesCountAndNotHowTheyLieInMemory) {
  for (const bool same : {true, false}) {
    on_ranks(2, [&](Rank& r) {
      at::Tensor& value = r.flat.model.values[0];
      const at::Tensor columns = value.detach().t().contiguous().t();
      if (r.rank == 1) {
        value.set_data(same ? columns : value.detach()[0][0].expand(value.sizes()));
      }
      const std::string text = r.check();
      EXPECT_EQ(text.empty(), same) << text;
    });
  }
}

TEST(ReplicaCheckTest, AFlippedBitIsFoundOnEveryRankByParameterAndRank) {
  for (const int world_size : {2, 3, 4}) {
    for (int culprit = 0; culprit < world_size; ++culprit) {
      on_ranks(world_size, [&](Rank& r) {
        at::Tensor bits = r.flat.model.values[1].detach().view(at::kShort);
        if (r.rank == culprit) bits[17] = bits[17].item<int16_t>() ^ 1;
        const std::string text = r.check();
        expect_words(text, {"rank " + std::to_string(r.rank) + ": parameter value1",
                            "expected the same values on every rank"});
        if (world_size > 2) {
          expect_words(text, {"\n  ranks " + std::to_string(culprit) + " hold hash "});
        }
        // Nobody looks where the caller says not to.
        EXPECT_EQ(r.check({true, false}), "");
      });
    }
  }
}

TEST(ReplicaCheckTest, MastersThatDoNotRoundToWorkingValuesAreFound) {
  for (const int world_size : {1, 2, 3}) {
    on_ranks(world_size, [&](Rank& r) {
      const int culprit = world_size - 1;
      bool holds = false;
      for (const SegmentTensors& s : r.shards.segments()) {
        if (s.segment.parameter != 1 || r.rank != culprit) continue;
        at::Tensor(s.master).narrow(0, s.segment.numel - 1, 1).mul_(3);
        holds = true;
      }
      ASSERT_EQ(holds, r.rank == culprit);
      expect_words(r.check(), {"parameter value1", "working values that are the rounded masters",
                               "got others on rank " + std::to_string(culprit)});
    });
  }
}

}  // namespace
}  // namespace zero
