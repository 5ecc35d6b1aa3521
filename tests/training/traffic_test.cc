// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Holds the bytes a rank sends per step to the formula, for every stage and
// world size. With P the padded size of all parameters in bytes:
//
//   every round             (W-1)/W * P   gradients, each rank's rows to their owners
//   stage 1, full gradients (W-1)/W * P   averaged gradients back
//   every step              (W-1)/W * P   parameters
//   norm                    16 (W-1)      two doubles
//   control message         56 (W-1)      per collective call; and a bit per parameter where ranks
//                                         used different ones
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include "bookkeeping/layout.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

int64_t padded_bytes(const Plan& plan) {
  int64_t bytes = 0;
  for (const Bucket& bucket : plan.buckets) {
    bytes += plan.bucket_numel(bucket) *
             static_cast<int64_t>(c10::elementSize(plan.arena_of(bucket).dtype));
  }
  return bytes;
}

void one_step(OddModel& model, ZeroOptimizer& optimizer, int rank, int rounds, bool clip = true) {
  for (int i = 0; i < rounds; ++i) {
    optimizer.backward(
        model->loss(random_tensor({3, 17}, rank), random_tensor({3, 11}, 9), OddModelImpl::kAll));
  }
  if (clip) optimizer.clip_grad_norm_(1.0);
  optimizer.step();
}

TEST(TrafficTest, BytesPerStepAreTheFormula) {
  for (int world_size : {1, 2, 3, 4}) {
    for (int64_t stage : {1, 2}) {
      for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
        run_ranks(world_size, [&](const Group& group) {
          OddModel model(1);
          ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                                  ZeroOptions().stage(stage).layout(layout).bucket_bytes(1000));
          one_step(model, optimizer, group.rank(), 1);  // the first step is like the rest
          const Stats before = optimizer.stats();
          one_step(model, optimizer, group.rank(), 2);
          const Stats after = optimizer.stats();
          const int64_t others = world_size - 1;
          const int64_t share = padded_bytes(optimizer.plan()) / world_size * others;
          const auto buckets = static_cast<int64_t>(optimizer.plan().buckets.size());
          const int64_t gathers = stage == 1 ? 2 : 1;
          EXPECT_EQ(after.data.exchange_bytes_sent - before.data.exchange_bytes_sent, 2 * share);
          EXPECT_EQ(after.data.gather_bytes_sent - before.data.gather_bytes_sent, gathers * share);
          EXPECT_EQ(after.data.small_bytes_sent - before.data.small_bytes_sent, 16 * others);
          if (world_size > 1) {
            EXPECT_EQ(after.data.exchange_calls - before.data.exchange_calls, 2 * buckets);
            EXPECT_EQ(after.data.gather_calls - before.data.gather_calls, gathers * buckets);
            EXPECT_EQ(after.data.small_calls - before.data.small_calls, 1);
            // One for clip_grad_norm_ and one for step().
            EXPECT_EQ(after.control.small_calls - before.control.small_calls, 2);
          }
          EXPECT_EQ(after.rounds - before.rounds, 2);
          EXPECT_EQ(after.steps - before.steps, 1);
          EXPECT_EQ(optimizer.memory().unsent_gradients, 0);
          // Without a clip a step gathers the parameters alone, also in stage 1.
          one_step(model, optimizer, group.rank(), 1, /*clip=*/false);
          EXPECT_EQ(optimizer.stats().data.gather_bytes_sent - after.data.gather_bytes_sent, share);
        });
      }
    }
  }
}

// Flags of used parameters are sent where ranks differ only, and then as bits.
TEST(TrafficTest, ControlMessagesDoNotGrowWithTheModelWhileRanksAgree) {
  for (const int world_size : {2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      torch::nn::Module module;
      constexpr int64_t kParameters = 100;
      for (int64_t p = 0; p < kParameters; ++p) {
        module.register_parameter("p" + std::to_string(p), random_tensor({2}, p));
      }
      const auto parameters = module.parameters();
      ZeroOptimizer optimizer(module, std::make_unique<torch::optim::SGD>(parameters, 0.1), group);
      const auto sent_by_step = [&](int64_t used) {
        at::Tensor loss = parameters[0].sum();
        for (int64_t p = 1; p < used; ++p) loss = loss + parameters[p].sum();
        optimizer.backward(loss);
        const int64_t before = optimizer.stats().control.small_bytes_sent;
        optimizer.step();
        return optimizer.stats().control.small_bytes_sent - before;
      };
      const int64_t others = world_size - 1;
      EXPECT_EQ(sent_by_step(kParameters), 14 * 4 * others);
      EXPECT_EQ(sent_by_step(kParameters / 2), 14 * 4 * others);
      const int64_t bits = (kParameters + 31) / 32 * 4;
      EXPECT_EQ(sent_by_step(group.rank() == 1 ? 33 : 1), (14 * 4 + bits) * others);
    });
  }
}

// Ranks that have the values of rank 0 are sent a hash; see also ModelsTest.
TEST(TrafficTest, ParametersAreSentOnlyToRanksThatHaveOthers) {
  for (const bool equal : {true, false}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      run_ranks(3, [&](const Group& group) {
        torch::nn::Module module;
        const int seed = equal ? 0 : group.rank() / 2;  // rank 2 alone differs
        const at::Tensor p = module.register_parameter("p", random_tensor({1000}, seed));
        const at::Tensor q = module.register_parameter("q", random_tensor({500}, 7));
        const ZeroOptimizer optimizer(module,
                                      std::make_unique<torch::optim::SGD>(module.parameters(), 0.1),
                                      group, ZeroOptions().layout(layout));
        EXPECT_TRUE(at::equal(p, random_tensor({1000}, 0)));
        EXPECT_TRUE(at::equal(q, random_tensor({500}, 7)));
        const int64_t sent = optimizer.stats().data.small_bytes_sent;
        if (equal) {
          EXPECT_LT(sent, 100);
        } else if (group.rank() == 0) {
          EXPECT_GT(sent, 1500 * 4);
        }
      });
    }
  }
}

// Two halves of a mesh with different parameters each agree by themselves first.
TEST(TrafficTest, MessagesWithinADomainOfAMeshAreCounted) {
  run_ranks(4, [](const Group& world) {
    const int first = world.rank() / 2 * 2;
    const Group half = world.subgroup({first, first + 1}, "half");
    torch::nn::Module module;
    const at::Tensor p = module.register_parameter("p", at::ones({5 + first}));
    ZeroOptimizer optimizer(module, std::make_unique<torch::optim::SGD>(module.parameters(), 0.1),
                            half, ZeroOptions().mesh_group(world));
    for (int step = 0; step < 2; ++step) {
      optimizer.backward(p.sum());
      const Traffic before = optimizer.stats().control;
      optimizer.step();
      const Traffic after = optimizer.stats().control;
      EXPECT_EQ(after.small_calls - before.small_calls, 2);
      EXPECT_EQ(after.small_bytes_sent - before.small_bytes_sent, 14 * 4 * 3 + 8 * 4);
    }
  });
}

// To log the norms of many small parameters.
TEST(TrafficTest, OneParameterIsGatheredWithoutTheRestOfItsBucket) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Layout layout :
         {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      run_ranks(world_size, [&](const Group& group) {
        OddModel model(1);
        ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                                ZeroOptions().layout(layout));
        for (const at::Tensor& p : model->parameters()) {
          if (!p.requires_grad()) continue;
          const int64_t before = optimizer.stats().data.gather_bytes_sent;
          EXPECT_TRUE(at::equal(optimizer.master(p), p));
          const int64_t sent = optimizer.stats().data.gather_bytes_sent - before;
          if (p.numel() > 30) continue;  // others may be most of the bucket
          EXPECT_LE(sent, (world_size - 1) * round_up(p.numel(), alignment_of(at::kFloat)) * 4);
        }
      });
    }
  }
}

void expect_nothing_sent_in_no_sync(int stage) {
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    ZeroOptimizer optimizer(*model, make_inner(Inner::kAdamW, *model), group,
                            ZeroOptions().stage(stage));
    const Stats before = optimizer.stats();
    {
      auto guard = optimizer.no_sync();
      for (int i = 0; i < 3; ++i) {
        optimizer.backward(
            model->loss(random_tensor({3, 17}, i), random_tensor({3, 11}, 9), OddModelImpl::kAll));
      }
    }
    const Stats after = optimizer.stats();
    EXPECT_EQ(after.data.exchange_bytes_sent, before.data.exchange_bytes_sent);
    EXPECT_EQ(after.data.gather_bytes_sent, before.data.gather_bytes_sent);
    EXPECT_EQ(after.control.small_calls, before.control.small_calls);
    optimizer.step();
    EXPECT_EQ(optimizer.stats().rounds, 1);
  });
}

TEST(TrafficTest, NoSyncSendsNothing) {
  for (const int stage : {1, 2}) {
    SCOPED_TRACE(stage);
    expect_nothing_sent_in_no_sync(stage);
  }
}

}  // namespace
}  // namespace zero
