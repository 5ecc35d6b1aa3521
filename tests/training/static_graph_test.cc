// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// static_graph(true): no control messages and no host decision about skipped steps, and still the
// same bits. On the CPU this runs the path that a GPU takes: the kernels read the clip coefficient,
// the flag of a step that is not finite and the counts of updates from memory.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/state_snapshot.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using namespace torch::optim;

constexpr int64_t kSizes[] = {37, 1, 70};
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<at::Tensor> initial_values(c10::ScalarType first, c10::ScalarType other) {
  return {random_tensor({kSizes[0]}, 1).to(first), random_tensor({kSizes[1]}, 2).to(other),
          random_tensor({kSizes[2]}, 3).to(other)};
}

std::vector<at::Tensor> gradients(int rank, int step) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < 3; ++i) {
    result.push_back(
        random_tensor({kSizes[i]}, static_cast<uint64_t>(100 * rank + 10 * step) + i + 4));
  }
  return result;
}

enum class Kind { kAdamW, kAdamWAmsgrad, kAdam, kSgd, kSgdMomentum };

std::unique_ptr<Optimizer> make_inner(Kind kind, const std::vector<at::Tensor>& values) {
  switch (kind) {
    case Kind::kAdamW:
      return std::make_unique<AdamW>(values, AdamWOptions(0.01).weight_decay(0.1));
    case Kind::kAdamWAmsgrad:
      return std::make_unique<AdamW>(values, AdamWOptions(0.01).amsgrad(true));
    case Kind::kAdam:
      return std::make_unique<Adam>(values, AdamOptions(0.01).weight_decay(0.1));
    case Kind::kSgd:
      return std::make_unique<SGD>(values, SGDOptions(0.1));
    case Kind::kSgdMomentum:
      // Dampening tells a first update from the others.
      return std::make_unique<SGD>(values, SGDOptions(0.1).momentum(0.9).dampening(0.3));
  }
  return nullptr;
}

struct Setting {
  Kind kind;
  c10::ScalarType first, other;
  int64_t stage;
  Layout layout;
  bool fused;
  bool overlap;
};

const Setting kSettings[] = {
    {Kind::kAdamW, at::kFloat, at::kFloat, 2, Layout::kContiguous, true, false},
    {Kind::kAdamW, at::kBFloat16, at::kFloat, 1, Layout::kPerParameter, true, false},
    {Kind::kAdamWAmsgrad, at::kBFloat16, at::kBFloat16, 2, Layout::kContiguous, true, true},
    {Kind::kAdam, at::kFloat, at::kFloat, 2, Layout::kPerParameter, true, false},
    {Kind::kSgd, at::kFloat, at::kBFloat16, 1, Layout::kContiguous, true, false},
    {Kind::kSgdMomentum, at::kFloat, at::kFloat, 2, Layout::kContiguous, true, false},
    {Kind::kSgdMomentum, at::kBFloat16, at::kFloat, 2, Layout::kPerParameter, true, true},
    {Kind::kSgdMomentum, at::kFloat, at::kFloat, 1, Layout::kContiguous, false, false},
};

void set_rates(Optimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

class StaticGraphAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, StaticGraphAt, ::testing::Values(1, 2, 3, 4));

// With skipped steps among them. In every second run the first one too, for then nothing has made
// the state yet: of each setting, on two of the numbers of ranks.
TEST_P(StaticGraphAt, HasTheBitsOfAnOrdinaryRunAndSendsNoControlMessages) {
  const int world_size = GetParam();
  for (const Setting& s : kSettings) {
    const bool first_is_bad = (&s - kSettings + world_size) % 2 == 0;
    run_ranks(world_size, [&](const Group& group) {
      SCOPED_TRACE(c10::str("kind ", static_cast<int>(s.kind), " first ", s.first, " stage ",
                            s.stage, " fused ", s.fused, " first bad ", first_is_bad));
      const auto options = ZeroOptions()
                               .stage(s.stage)
                               .layout(s.layout)
                               .fused(s.fused)
                               .overlap_gather(s.overlap)
                               .bucket_bytes(128);
      GivenGradients model(initial_values(s.first, s.other));
      GivenGradients ordinary_model(initial_values(s.first, s.other));
      ZeroOptimizer optimizer(model, make_inner(s.kind, model.parameters()), group,
                              ZeroOptions(options).static_graph(true));
      ZeroOptimizer ordinary(ordinary_model, make_inner(s.kind, ordinary_model.parameters()), group,
                             options);
      int64_t messages = 0;
      int64_t skipped = 0;
      for (int step = 0; step < 6; ++step) {
        const bool bad = step == 3 || (step == 0 && first_is_bad);
        const int bad_rank = bad ? step % world_size : -1;
        double norms[2];
        // A schedule, of which steps have the last value, whatever was sent before.
        if (step % 2 == 1) {
          set_rates(optimizer, 3.0);
          optimizer.refresh_learning_rates();
        }
        for (ZeroOptimizer* one : {&optimizer, &ordinary}) {
          set_rates(*one, 0.02 / (step + 1));
          const GivenGradients& m = one == &optimizer ? model : ordinary_model;
          for (int micro = 0; micro < 2; ++micro) {  // halves of one gradient
            std::vector<at::Tensor> g = gradients(group.rank(), step);
            for (at::Tensor& t : g) t.mul_(0.5);
            if (group.rank() == bad_rank && micro == 1) g[2][69].fill_(kInfinity);
            one->backward(m.loss(g));
          }
          // Also a step without a norm of its own, and one measured twice.
          if (step != 4) norms[one == &optimizer] = one->clip_grad_norm_(0.5).item<double>();
          if (step == 5) {
            EXPECT_NEAR(one->grad_norm().item<double>(), 0.5, 1e-5);
          }
          one->step();
          EXPECT_EQ(one->step_skipped(), bad);
          if (s.overlap) one->wait_for(m);
        }
        skipped += bad ? 1 : 0;
        if (step != 4) {
          EXPECT_EQ(norms[0], norms[1]);
        }
        EXPECT_TRUE(same_bits(everything(model, optimizer), everything(ordinary_model, ordinary)))
            << "step " << step;
        const Stats stats = optimizer.stats();
        EXPECT_EQ(stats.steps, step + 1 - skipped);
        EXPECT_EQ(stats.skipped_steps, skipped);
        if (step == 0) messages = stats.control.small_calls;
        EXPECT_EQ(stats.control.small_calls, messages);
      }
      optimizer.check_replicas();
    });
  }
}

TEST_P(StaticGraphAt, EachGroupHasItsOwnRate) {
  run_ranks(GetParam(), [&](const Group& group) {
    const auto train = [&](bool static_graph) {
      GivenGradients model(initial_values(at::kFloat, at::kBFloat16));
      std::vector<OptimizerParamGroup> groups;
      for (const at::Tensor& p : model.parameters()) groups.emplace_back(std::vector{p});
      ZeroOptimizer optimizer(model, std::make_unique<AdamW>(groups, AdamWOptions(0.01)), group,
                              ZeroOptions().bucket_bytes(128).static_graph(static_graph));
      for (int step = 0; step < 4; ++step) {
        double rate = 0.01 / (step + 1);
        for (auto& one : optimizer.param_groups()) one.options().set_lr(rate *= 0.5);
        optimizer.backward(model.loss(gradients(group.rank(), step)));
        optimizer.step();
      }
      return everything(model, optimizer);
    };
    EXPECT_TRUE(same_bits(train(true), train(false)));
  });
}

// The scale follows a step that the host did not wait for.
TEST_P(StaticGraphAt, TheLossScaleFollowsSkippedSteps) {
  run_ranks(GetParam(), [&](const Group& group) {
    const auto options =
        ZeroOptions()
            .loss_scaler(LossScalerOptions().initial_scale(1024).growth_interval(2).min_scale(512))
            .max_skipped_in_a_row(2);
    GivenGradients model(initial_values(at::kHalf, at::kFloat));
    GivenGradients ordinary_model(initial_values(at::kHalf, at::kFloat));
    ZeroOptimizer optimizer(model, make_inner(Kind::kAdamW, model.parameters()), group,
                            ZeroOptions(options).static_graph(true));
    ZeroOptimizer ordinary(ordinary_model, make_inner(Kind::kAdamW, ordinary_model.parameters()),
                           group, options);
    const std::string outcomes = "..x..xx";
    for (size_t step = 0; step < outcomes.size(); ++step) {
      for (ZeroOptimizer* one : {&optimizer, &ordinary}) {
        const GivenGradients& m = one == &optimizer ? model : ordinary_model;
        std::vector<at::Tensor> g = gradients(group.rank(), static_cast<int>(step));
        if (outcomes[step] == 'x' && group.rank() == 0) g[0].fill_(kInfinity);
        if (step % 2 == 0) {
          one->backward(m.loss(g));
        } else {
          one->scale_loss(m.loss(g)).backward();
        }
        one->step();
      }
      if (step % 3 == 2) {
        EXPECT_EQ(optimizer.loss_scale(), ordinary.loss_scale());
      }
      EXPECT_TRUE(same_bits(everything(model, optimizer), everything(ordinary_model, ordinary)))
          << "step " << step;
    }
    EXPECT_EQ(optimizer.loss_scale(), ordinary.loss_scale());
    EXPECT_EQ(optimizer.loss_scale(), 512);
    const auto fail = [&] {
      for (int i = 0; i < 4; ++i) {
        optimizer.backward(model.loss(
            {at::full({kSizes[0]}, kInfinity), at::ones({kSizes[1]}), at::ones({kSizes[2]})}));
        optimizer.step();
      }
    };
    EXPECT_THROW(fail(), c10::Error);
  });
}

// Counts on the device, and the loss scale that follows them, reach a checkpoint and come back.
TEST_P(StaticGraphAt, CheckpointsPassBetweenBothKinds) {
  const auto folder =
      std::filesystem::path(::testing::TempDir()) / ("static_graph_" + std::to_string(GetParam()));
  std::filesystem::remove_all(folder);
  for (const Kind kind : {Kind::kAdamW, Kind::kSgdMomentum}) {
    run_ranks(GetParam(), [&](const Group& group) {
      const auto path = [&](const char* name) {
        return (folder / (std::to_string(static_cast<int>(kind)) + name)).string();
      };
      std::filesystem::create_directories(folder);
      const auto train = [&](GivenGradients& m, ZeroOptimizer& o, int begin, int end) {
        for (int step = begin; step < end; ++step) {
          std::vector<at::Tensor> g = gradients(group.rank(), step);
          if (step == 2) g[0][0].fill_(kInfinity);
          o.backward(m.loss(g));
          o.step();
        }
      };
      const auto options = ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(1024));
      std::vector<at::Tensor> expected;
      for (const bool saved_static : {false, true}) {
        GivenGradients model(initial_values(at::kFloat, at::kFloat));
        ZeroOptimizer optimizer(model, make_inner(kind, model.parameters()), group,
                                ZeroOptions(options).static_graph(saved_static));
        train(model, optimizer, 0, 3);  // the host has not heard of the last step
        optimizer.save_checkpoint(path(saved_static ? "static" : "ordinary"));
        train(model, optimizer, 3, 6);
        if (expected.empty()) expected = everything(model, optimizer);
        EXPECT_TRUE(same_bits(everything(model, optimizer), expected));
        for (const bool loaded_static : {false, true}) {
          GivenGradients other(initial_values(at::kFloat, at::kFloat));
          ZeroOptimizer resumed(other, make_inner(kind, other.parameters()), group,
                                ZeroOptions(options).static_graph(loaded_static));
          if (loaded_static) train(other, resumed, 1, 3);  // what must not stay
          resumed.load_checkpoint(path(saved_static ? "static" : "ordinary"));
          EXPECT_EQ(resumed.stats().steps, 2);
          EXPECT_EQ(resumed.stats().skipped_steps, 1);
          EXPECT_EQ(resumed.loss_scale(), 512);
          train(other, resumed, 3, 6);
          EXPECT_TRUE(same_bits(everything(other, resumed), expected))
              << "saved static " << saved_static << ", loaded static " << loaded_static;
        }
      }
    });
  }
  std::filesystem::remove_all(folder);
}

// --- A broken promise

class BrokenPromiseAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, BrokenPromiseAt, ::testing::Values(2, 3));

TEST_P(BrokenPromiseAt, AnUnusedParameterInTheFirstStepReachesEveryRank) {
  run_ranks(GetParam(), [&](const Group& group) {
    GivenGradients model(initial_values(at::kFloat, at::kFloat));
    ZeroOptimizer optimizer(model, make_inner(Kind::kAdamW, model.parameters()), group,
                            ZeroOptions().static_graph(true));
    std::vector<at::Tensor> g = gradients(group.rank(), 0);
    if (group.rank() == 1) g[2] = at::Tensor();
    optimizer.backward(model.loss(g));
    const std::string error = error_of([&] { optimizer.step(); });
    EXPECT_NE(error.find("parameter value2: expected a gradient in every step on every rank"),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("rank 1"), std::string::npos) << error;
    // Nothing is lost: the first step can be made again.
    optimizer.zero_grad();
    optimizer.backward(model.loss(gradients(group.rank(), 0)));
    optimizer.step();
    EXPECT_EQ(optimizer.stats().steps, 1);
  });
}

// `unused`: rank 1 does not use a parameter; else it makes one pass more.
void expect_the_others_time_out(int world_size, bool unused) {
  std::atomic<int> timed_out{0};
  run_ranks(world_size,
            [&](const Group& group) {
              GivenGradients model(initial_values(at::kFloat, at::kFloat));
              ZeroOptimizer optimizer(model, make_inner(Kind::kAdamW, model.parameters()), group,
                                      ZeroOptions().static_graph(true));
              const auto pass = [&](int step, bool all) {
                std::vector<at::Tensor> g = gradients(group.rank(), step);
                if (!all) g[0] = at::Tensor();
                optimizer.backward(model.loss(g));
              };
              pass(0, true);
              optimizer.step();
              pass(1, group.rank() != 1 || !unused);
              if (group.rank() == 1 && !unused) {
                // Sends a second round, which no other rank expects.
                const auto guard = optimizer.no_sync();
                pass(1, true);
              }
              const std::string error = error_of([&] { optimizer.step(); });
              if (group.rank() == 1) {
                EXPECT_NE(
                    error.find(unused ? "parameter value0: expected a gradient in every step"
                                      : "expected as many as in the first one, which needed 1"),
                    std::string::npos)
                    << error;
                // Its connections stay open until the others have waited in vain.
                while (timed_out < group.world_size() - 1) {
                  std::this_thread::sleep_for(std::chrono::milliseconds(10));
                }
              } else {
                EXPECT_NE(error.find("rank 1"), std::string::npos) << error;
                EXPECT_NE(error.find("had reported"), std::string::npos) << error;
                ++timed_out;
              }
            },
            {.transport = kRealTransport, .timeout = std::chrono::seconds(3)});
}

// Later nobody is told, so the others' time runs out: an error that names the rank, not a hang.
TEST_P(BrokenPromiseAt, LaterThatRankThrowsAndTheOthersTimeOut) {
  // Both at once: what takes time is waiting.
  auto other = std::async(std::launch::async, expect_the_others_time_out, GetParam(), false);
  expect_the_others_time_out(GetParam(), true);
  other.get();
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
