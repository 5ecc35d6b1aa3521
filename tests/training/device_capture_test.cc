// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Steps that a graph repeats, on an emulated device that knows what CUDA forbids in a capture: see
// EmulatedGraph of tests/support/device/emulated_device.h.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <latch>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "tests/support/error_of.h"
#include "tests/support/training.h"
#include "zero/base/streams.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Uses every parameter in every pass.
struct MlpImpl : torch::nn::Module {
  MlpImpl(at::Device device, c10::ScalarType dtype)
      : in(register_module("in", Affine(17, 23, device))),
        out(register_module("out", Affine(23, 11, device))) {
    uint64_t seed = 1;
    for (at::Tensor& p : parameters()) {
      p.set_data(random_tensor(p.sizes(), seed++).mul(0.2).to(device, dtype));
    }
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target) {
    return (out(at::tanh(in(x))) - target).pow(2).mean();
  }
  Affine in, out;
};
TORCH_MODULE(Mlp);

struct Setting {
  bool adamw = true;
  c10::ScalarType dtype = at::kFloat;
  int passes = 1;  // of a step
  bool saves = false;
  bool replicas = false;  // two halves of the ranks hold copies
  bool outlier = false;   // the last step is left out
  ZeroOptions options;
};

// Of two or four ranks.
ZeroOptions with_replicas(const Group& group, ZeroOptions options) {
  const int half = group.world_size() / 2, place = group.rank() % half;
  std::vector<int> own_half(half);
  std::iota(own_half.begin(), own_half.end(), group.rank() - place);
  return options.placement(0,
                           GroupPlacement()
                               .sharded_over(group.subgroup(own_half, "shards"))
                               .replicated_over(group.subgroup({place, place + half}, "copies")));
}

std::string text_of(int ranks, const Setting& s) {
  return c10::str(ranks, " ranks, stage ", s.options.stage(), ", layout ",
                  static_cast<int>(s.options.layout()), ", ", s.dtype, s.adamw ? "" : ", SGD",
                  s.saves ? ", saves" : "");
}

// A rank, on a stream that can be captured.
struct TrainedRank {
  TrainedRank(const Group& group, Setting setting)
      : s(std::move(setting)),
        on(group.device()),
        stream(new_stream(group.device())),
        model(group.device(), s.dtype),
        optimizer(
            *model, inner(), group,
            (s.replicas ? with_replicas(group, s.options) : ZeroOptions(s.options))
                .static_graph(true)
                .skip_if(s.outlier ? std::make_shared<OutlierRule>(6, /*window=*/4) : nullptr)),
        x(random_tensor({8, 17}, 50 + group.rank()).to(group.device(), s.dtype)),
        target(random_tensor({8, 11}, 60 + group.rank()).to(group.device(), s.dtype)) {}
  ~TrainedRank() { EmulatedDevice::finish(); }

  std::unique_ptr<torch::optim::Optimizer> inner() {
    if (s.adamw) return std::make_unique<torch::optim::AdamW>(model->parameters(), 0.01);
    return std::make_unique<torch::optim::SGD>(model->parameters(),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  void next_rate() {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(0.01 / ++steps);
  }
  void step() {
    for (int pass = 0; pass < s.passes; ++pass) optimizer.backward(model->loss(x, target));
    if (!optimizer.options().update_in_backward()) optimizer.clip_grad_norm_(0.5);
    optimizer.step();
  }
  std::vector<at::Tensor> values() {
    std::vector<at::Tensor> result;
    for (const at::Tensor& p : model->parameters()) result.push_back(p.detach().cpu());
    return result;
  }

  const Setting s;
  const c10::DeviceGuard on;
  const c10::StreamGuard stream;
  Mlp model;
  ZeroOptimizer optimizer;
  at::Tensor x, target;
  int steps = 0;
  EmulatedGraph graph;
};

// Parameters after seven steps with other learning rates each, and what two saves have. Of a
// captured one the first two steps are on another stream, as torch's recipe says, and the others
// are replays, but for one.
std::vector<at::Tensor> after_seven_steps(const Group& group, const Setting& s, bool captured) {
  const std::string folder = ::testing::TempDir() + "/capture/";
  TrainedRank run(group, s);
  const c10::Stream current = current_torch_stream(group.device());
  const auto rates_and = [&](const std::function<void()>& step) {
    run.next_rate();
    if (captured && run.steps > 2) run.optimizer.refresh_learning_rates();
    step();
  };
  {
    const c10::StreamGuard warm_up(new_stream(group.device()));
    make_wait(current_torch_stream(group.device()), current);
    for (int i = 0; i < 2; ++i) rates_and([&] { run.step(); });
    make_wait(current, current_torch_stream(group.device()));
  }
  std::shared_ptr<PendingCheckpoint> before, between;
  if (s.saves) before = run.optimizer.save_checkpoint_async(folder + "before");
  if (captured) {
    run.graph.capture_begin();
    run.step();
    run.graph.capture_end();
  }
  for (int i = 0; i < 5; ++i) {
    if (s.outlier && i == 4) {
      run.target.mul_(2);
      SkipRule& rule = *run.optimizer.options().skip_if();
      if (!captured) rule.set_state(rule.state());  // as after a load
    }
    rates_and([&] { captured&& i != 2 ? run.graph.replay() : run.step(); });
    if (!s.saves || i != 2) continue;
    // The next replay changes the shard. It runs no code of the library that could wait.
    EmulatedDevice::set_copy_time(std::chrono::milliseconds(30));
    between = run.optimizer.save_checkpoint_async(folder + "between");
  }
  EmulatedDevice::set_copy_time({});
  std::vector<at::Tensor> result = run.values();
  EXPECT_EQ(run.optimizer.stats().steps, s.outlier ? 6 : 7);
  for (const auto& [save, name] : {std::pair{before, "before"}, {between, "between"}}) {
    if (!save) continue;
    save->finish();
    run.optimizer.load_checkpoint(folder + name);
    for (const at::Tensor& value : run.values()) result.push_back(value);
  }
  return result;
}

void expect_equal_bits(int ranks, const Setting& s, const DeviceRunOptions& options = {}) {
  std::vector<at::Tensor> without, with;
  for (const bool captured : {false, true}) {
    std::filesystem::remove_all(::testing::TempDir() + "/capture");
    std::filesystem::create_directories(::testing::TempDir() + "/capture");
    run_device_ranks(
        ranks,
        [&](const Group& group) {
          const auto values = after_seven_steps(group, s, captured);
          if (group.rank() == 0) (captured ? with : without) = values;
        },
        options);
  }
  ASSERT_EQ(with.size(), without.size());
  for (size_t i = 0; i < with.size(); ++i) {
    EXPECT_TRUE(at::equal(with[i], without[i])) << text_of(ranks, s) << ", tensor " << i;
  }
}

// Stages take turns, so that each number of ranks and layout has both. Optimizers, dtypes, saves
// and numbers of passes change at other turns, so that each stage has both of them.
TEST(DeviceCaptureTest, ReplaysHaveTheBitsOfStepsThatWereNotCaptured) {
  int turn = 0;
  for (const int ranks : {1, 2, 3}) {
    for (const Layout layout :
         {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      Setting s;
      s.saves = turn / 2 % 2 == 0;
      s.adamw = turn % 3 != 1;
      s.dtype = turn % 4 < 2 ? at::kFloat : at::kBFloat16;
      s.passes = 1 + turn / 3 % 2;
      s.options = ZeroOptions().stage(1 + turn % 2).layout(layout).bucket_bytes(1024);
      ++turn;
      expect_equal_bits(ranks, s);
    }
  }
}

TEST(DeviceCaptureTest, TwoLevelsAreCaptured) {
  Setting s;
  s.options = ZeroOptions().bucket_bytes(1024);
  expect_equal_bits(4, s, {.ranks_per_machine = 2});
}

TEST(DeviceCaptureTest, ReplicasAreCaptured) {
  Setting s;
  s.replicas = true;
  s.options = ZeroOptions().bucket_bytes(1024);
  expect_equal_bits(4, s);
}

TEST(DeviceCaptureTest, ARuleForOutliersIsCaptured) {
  Setting s;
  s.outlier = true;
  s.options = ZeroOptions().bucket_bytes(1024);
  expect_equal_bits(2, s);
}

// Before anything spoils the capture: it ends in order, and training goes on.
TEST(DeviceCaptureTest, WhatCannotBeCapturedIsRefused) {
  struct Case {
    std::string expected;  // in the error
    std::function<void(TrainedRank&)> captured;
    Setting setting = {};
    bool warms_up = true;
    DeviceRunOptions options = {};
  };
  const auto step = [](TrainedRank& run) { run.step(); };
  Setting overlaps, scaled, unfused, early, replicas;
  replicas.replicas = true;  // each rank is alone with its shards
  early.options.update_in_backward(true).skip_nonfinite(false);
  overlaps.options.overlap_gather(true);
  scaled.options.loss_scaler(LossScalerOptions());
  unfused.options.fused(false);
  const std::vector<Case> cases = {
      {"overlap_gather(true)", step, overlaps},
      {"update_in_backward(true)", step, early},
      {"a dynamic loss scale", step, scaled},
      {"an optimizer that runs its own step()", step, unfused},
      {"a transport on which the host waits for other ranks", step, {}, true, {.over_host = true}},
      {"a transport on which the host waits", step, replicas, true, {.over_host = true}},
      {"the first step", step, {}, false},
      {"expected the learning rates that the last step used",
       [](TrainedRank& run) {
         for (auto& group : run.optimizer.param_groups()) group.options().set_lr(0.123);
         run.optimizer.backward(run.model->loss(run.x, run.target));
         run.optimizer.step();
       }},
      {"refresh_learning_rates(): expected no capture",
       [](TrainedRank& run) { run.optimizer.refresh_learning_rates(); }},
      {"refresh_master_parameters()",
       [](TrainedRank& run) { run.optimizer.refresh_master_parameters(); }}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.expected);
    run_device_ranks(
        2,
        [&](const Group& group) {
          TrainedRank run(group, c.setting);
          if (c.warms_up) run.step();
          run.optimizer.wait_for(*run.model);
          run.graph.capture_begin();
          const std::string error = error_of([&] { c.captured(run); });
          EXPECT_NE(error.find(c.expected), std::string::npos) << c.expected << error;
          run.graph.capture_end();
          run.optimizer.zero_grad();
          run.step();
        },
        c.options);
  }
}

TEST(DeviceCaptureTest, AStepOutsideOfTheGraphOfItsBackwardPassIsRefused) {
  run_device_ranks(1, [](const Group& group) {
    TrainedRank run(group, Setting());
    run.step();
    run.graph.capture_begin();
    run.optimizer.backward(run.model->loss(run.x, run.target));
    run.graph.capture_end();
    run.graph.replay();
    run.optimizer.step();  // which knows of the pass that was captured
    run.graph.replay();
    expect_words(error_of([&] { run.optimizer.step(); }),
                 {"as static_graph(true) promises", "got none at all",
                  "CUDA graph that has backward() and not step()", "capture both"});
    run.optimizer.zero_grad();
    run.step();
  });
}

// Replays run no code of the library, and NCCL reports no error of what a graph has.
TEST(DeviceCaptureTest, AReplayEndsWhenARankHasEnded) {
  EmulatedNetwork network;
  std::latch over(1);
  std::vector<std::string> of_the_dead;
  run_device_ranks(2,
                   [&](const Group& group) {
                     TrainedRank run(group, Setting());
                     run.step();
                     run.graph.capture_begin();
                     run.step();
                     run.graph.capture_end();
                     run.graph.replay();
                     run.values();
                     if (group.rank() == 1) {
                       network.kill(1);
                       return over.wait();
                     }
                     const auto begin = std::chrono::steady_clock::now();
                     run.graph.replay();
                     run.values();
                     EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
                     const std::string error =
                         error_of([&] { run.optimizer.refresh_learning_rates(); });
                     EXPECT_NE(error.find("lost rank 1"), std::string::npos) << error;
                     over.count_down();
                   },
                   {.finishes = false, .violations = &of_the_dead, .network = &network});
}

TEST(DeviceCaptureTest, AveragesAndNarrowStatesAreCaptured) {
  Setting s;
  s.dtype = at::kBFloat16;
  s.options = ZeroOptions()
                  .bucket_bytes(1024)
                  .ema(EmaOptions().decay(0.9))
                  .moments(Moments::kInt8)
                  .split_masters(true)
                  .gradient_shard_dtype(at::kBFloat16);
  expect_equal_bits(2, s);
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
