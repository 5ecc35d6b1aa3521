// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptimizer on a GPU, against the same run on the CPU. Every test skips, and says so, where
// there is no GPU.
#include <ATen/Functions.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "tests/support/transports.h"
#include "zero/comm/backends/nccl.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

const at::Device kGpu(at::kCUDA, 0);

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(at::Device device, c10::ScalarType dtype)
      : in(register_module("in", torch::nn::Linear(64, 129))),
        out(register_module("out", torch::nn::Linear(129, 33))) {
    const at::NoGradGuard no_grad;
    uint64_t seed = 1;
    for (at::Tensor& p : parameters()) p.copy_(random_tensor(p.sizes(), seed++).mul(0.2));
    to(device, dtype);
  }
  at::Tensor loss(const at::Tensor& x, const at::Tensor& target) {
    return (out(at::tanh(in(x))).to(at::kFloat) - target).pow(2).mean();
  }
  torch::nn::Linear in, out;
};
TORCH_MODULE(Mlp);

struct Setting {
  bool adamw = true;
  c10::ScalarType dtype = at::kFloat;
  ZeroOptions options;
};

std::unique_ptr<torch::optim::Optimizer> make_inner(const Setting& s, Mlp& model) {
  if (s.adamw) {
    return std::make_unique<torch::optim::AdamW>(model->parameters(), 0.01);
  }
  return std::make_unique<torch::optim::SGD>(
      model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.2));
}

struct Batch {
  at::Tensor x, target;
};

Batch batch_of(int rank, int step, at::Device device, c10::ScalarType dtype) {
  const auto seed = static_cast<uint64_t>(1000 * rank + 10 * step);
  return {random_tensor({16, 64}, seed + 100).to(device, dtype),
          random_tensor({16, 33}, seed + 101).to(device)};
}

// Appends the parameters, in host memory as fp32.
void append_parameters(Mlp& model, std::vector<at::Tensor>& to) {
  for (const at::Tensor& p : model->parameters()) {
    to.push_back(p.detach().to(at::kCPU, at::kFloat, false, /*copy=*/true));
  }
}

// After each step, all parameters, and with an average what it is.
Trajectory train(const Group& group, at::Device device, const Setting& s, int steps) {
  Mlp model(device, s.dtype);
  ZeroOptimizer optimizer(*model, make_inner(s, model), group, s.options);
  Trajectory result;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = batch_of(group.rank(), step, device, s.dtype);
    at::Tensor loss = model->loss(batch.x, batch.target);
    if (step == 2 && group.rank() == 0) loss = loss * std::numeric_limits<double>::infinity();
    optimizer.backward(loss);
    optimizer.clip_grad_norm_(0.5);
    optimizer.step();
    EXPECT_EQ(optimizer.step_skipped(), step == 2);
    result.emplace_back();
    append_parameters(model, result.back());
    if (!s.options.ema()) continue;
    const auto averages = optimizer.use_ema();
    append_parameters(model, result.back());
  }
  EXPECT_EQ(optimizer.stats().steps, steps - 1);
  return result;
}

// Since ranks that share a GPU cannot use NCCL.
const RunOptions kOverGloo{.transport = kRealTransport};

class CudaOptimizer : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(CudaOptimizer, FollowsTheCpu) {
  for (const int world_size : {1, 2, 3}) {
    for (const bool adamw : {true, false}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (const int64_t stage : {1, 2}) {
          for (const bool fused : {true, false}) {
            for (const auto layout : {Layout::kContiguous, Layout::kPerParameter}) {
              Setting s{adamw, dtype,
                        ZeroOptions().stage(stage).fused(fused).layout(layout).bucket_bytes(8192)};
              if (stage == 2) s.options.ema(EmaOptions().decay(0.9));
              run_ranks(
                  world_size,
                  [&](const Group& group) {
                    const Trajectory cpu = train(group, at::kCPU, s, 6);
                    const Trajectory gpu = train(group, kGpu, s, 6);
                    // What differs is the order in which the model's products are added up.
                    EXPECT_LT(largest_difference(gpu, cpu), dtype == at::kFloat ? 1e-4 : 3e-2)
                        << "W " << world_size << " adamw " << adamw << " " << dtype << " stage "
                        << stage << " fused " << fused;
                    if (!fused || stage == 1) return;
                    // A difference in the last bit may round a moment to the next code.
                    Setting narrow = s;
                    narrow.options.moments(adamw ? Moments::kInt8 : Moments::kBFloat16);
                    EXPECT_LT(largest_difference(train(group, kGpu, narrow, 6),
                                                 train(group, at::kCPU, narrow, 6)),
                              dtype == at::kFloat ? 4e-3 : 3e-2)
                        << "W " << world_size << " adamw " << adamw << " " << dtype;
                  },
                  kOverGloo);
            }
          }
        }
      }
    }
  }
}

// A stop of the host between backward() and the end of step() is an error here.
TEST_F(CudaOptimizer, AStepNeverWaitsForTheDevice) {
  run_ranks(
      1,
      [&](const Group& group) {
        Setting s{true, at::kBFloat16,
                  ZeroOptions().bucket_bytes(8192).ema(EmaOptions()).moments(Moments::kInt8)};
        Mlp model(kGpu, s.dtype);
        ZeroOptimizer optimizer(*model, make_inner(s, model), group, s.options);
        const Batch batch = batch_of(0, 0, kGpu, s.dtype);
        for (int step = 0; step < 5; ++step) {
          if (step == 2) {
            c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
          }
          optimizer.backward(model->loss(batch.x, batch.target));
          optimizer.clip_grad_norm_(0.5);
          optimizer.step();
        }
        c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
        EXPECT_EQ(optimizer.stats().steps, 5);
      },
      kOverGloo);
}

void set_rate(ZeroOptimizer& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(rate);
}

// Parameters after six steps, which have other learning rates each. Of a captured one, the first
// two steps run on another stream, as torch's recipe says, and the others are replays.
std::vector<at::Tensor> after_six_steps(const Group& group, const Setting& s, bool captured) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  Mlp model(kGpu, s.dtype);
  ZeroOptimizer optimizer(*model, make_inner(s, model), group, s.options);
  const Batch batch = batch_of(0, 0, kGpu, s.dtype);
  int step = 0;
  const auto next_rate = [&] { set_rate(optimizer, 0.01 / ++step); };
  const auto iteration = [&] {
    optimizer.backward(model->loss(batch.x, batch.target));
    optimizer.clip_grad_norm_(0.5);
    optimizer.step();
  };
  for (int i = 0; i < 2; ++i) {
    next_rate();
    iteration();
  }
  if (captured) {
    c10::cuda::device_synchronize();
    const c10::cuda::CUDAStreamGuard of_capture(c10::cuda::getStreamFromPool());
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    iteration();
    graph.capture_end();
    for (int i = 0; i < 4; ++i) {
      next_rate();
      optimizer.refresh_learning_rates();
      graph.replay();
    }
    c10::cuda::device_synchronize();
  } else {
    for (int i = 0; i < 4; ++i) {
      next_rate();
      iteration();
    }
  }
  EXPECT_EQ(optimizer.stats().steps, 6);
  std::vector<at::Tensor> result;
  append_parameters(model, result);
  const auto averages = optimizer.use_ema();
  append_parameters(model, result);
  return result;
}

TEST_F(CudaOptimizer, AnIterationInACudaGraphHasTheBitsOfOneWithout) {
  run_ranks(
      1,
      [&](const Group& group) {
        for (const bool adamw : {true, false}) {
          for (const auto layout : {Layout::kContiguous, Layout::kPerParameter}) {
            const Setting s{adamw, at::kBFloat16,
                            ZeroOptions().static_graph(true).layout(layout).bucket_bytes(8192).ema(
                                EmaOptions().decay(0.99).warm_up(true))};
            for (const Moments moments : {Moments::kFloat32, Moments::kBFloat16, Moments::kInt8}) {
              Setting stored = s;
              stored.options.moments(moments);
              stored.options.split_masters(layout == Layout::kContiguous);
              if (moments == Moments::kInt8) stored.options.gradient_shard_dtype(at::kBFloat16);
              const auto without = after_six_steps(group, stored, /*captured=*/false);
              const auto with = after_six_steps(group, stored, /*captured=*/true);
              for (size_t i = 0; i < with.size(); ++i) {
                EXPECT_TRUE(at::equal(with[i], without[i])) << "tensor " << i;
              }
            }
          }
        }
      },
      kOverGloo);
}

// An optimizer with static_graph, on a stream that can be captured.
struct Captured {
  Captured(const Group& group, const ZeroOptions& options)
      : guard(c10::cuda::getStreamFromPool()),
        model(kGpu, at::kFloat),
        optimizer(*model, make_inner({}, model), group, ZeroOptions(options).static_graph(true)),
        batch(batch_of(0, 0, kGpu, at::kFloat)) {}
  void backward() { optimizer.backward(model->loss(batch.x, batch.target)); }

  c10::cuda::CUDAStreamGuard guard;
  Mlp model;
  ZeroOptimizer optimizer;
  Batch batch;
  at::cuda::CUDAGraph graph;
};

// Of two saves, the copies of one are under way when a capture begins, and of the other when a
// graph is replayed.
TEST_F(CudaOptimizer, ASaveBesideACudaGraphIsOfItsMoment) {
  const std::string folder = ::testing::TempDir() + "/graph_saves";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  run_ranks(
      1,
      [&](const Group& group) {
        Captured run(group, ZeroOptions().bucket_bytes(1024));
        const auto values = [&] {
          std::vector<at::Tensor> result;
          for (const at::Tensor& p : run.model->parameters()) result.push_back(p.detach().clone());
          return result;
        };
        run.backward();
        run.optimizer.step();
        const std::vector<at::Tensor> first = values();
        const auto captured = run.optimizer.save_checkpoint_async(folder + "/captured");
        run.graph.capture_begin();
        run.backward();
        run.optimizer.step();
        run.graph.capture_end();
        run.graph.replay();
        const std::vector<at::Tensor> second = values();
        captured->finish();
        const auto replayed = run.optimizer.save_checkpoint_async(folder + "/replayed");
        for (int i = 0; i < 4; ++i) run.graph.replay();
        replayed->finish();
        const auto expect = [&](const std::string& name, const std::vector<at::Tensor>& expected) {
          run.optimizer.load_checkpoint(folder + "/" + name);
          const std::vector<at::Tensor> loaded = values();
          for (size_t i = 0; i < loaded.size(); ++i) {
            EXPECT_TRUE(at::equal(loaded[i], expected[i])) << name << " parameter " << i;
          }
        };
        expect("replayed", second);
        expect("captured", first);
      },
      kOverGloo);
}

// Replays would go on with the rates before.
TEST_F(CudaOptimizer, CaptureWithRatesThatWereNotSentIsRefused) {
  run_ranks(
      1,
      [&](const Group& group) {
        Captured run(group, {});
        run.backward();
        run.optimizer.step();
        set_rate(run.optimizer, 0.123);
        run.graph.capture_begin();
        run.backward();
        EXPECT_THROW(run.optimizer.refresh_learning_rates(), c10::Error);
        EXPECT_THROW(run.optimizer.step(), c10::Error);
        run.graph.capture_end();
      },
      kOverGloo);
}

TEST_F(CudaOptimizer, CaptureOfUpdatesInTheBackwardPassIsRefused) {
  run_ranks(1, [&](const Group& group) {
    Captured run(group, ZeroOptions().update_in_backward(true).skip_nonfinite(false));
    run.backward();
    run.optimizer.step();
    run.graph.capture_begin();
    EXPECT_THROW(run.backward(), c10::Error);
    run.graph.capture_end();
  });
}

// One rank, because one GPU may be all there is: the calls, their streams and their results, while
// what travels between ranks is not tested by it.
TEST_F(CudaOptimizer, NcclCarriesEveryCollective) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Communicator ranks(make_nccl_backend(store, 0, 1, kGpu, std::chrono::seconds(60)), "nccl",
                     std::chrono::seconds(60), RowTransport::kWhole);
  const at::Tensor rows = random_tensor({1, 1000}, 1).to(kGpu);
  const at::Tensor received = at::zeros_like(rows);
  ranks.exchange_rows(rows, received, "rows").wait();
  const std::vector<at::Tensor> sum = reduced_rows(ranks, rows, "rows");
  const std::vector<at::Tensor> halves = reduced_rows(ranks, rows.to(at::kHalf), "rows");
  at::Tensor gathered = rows.clone();
  ranks.gather_rows(gathered, "rows").wait();
  at::Tensor values = rows[0].to(at::kDouble);
  ranks.all_reduce_sum(values, "values").wait();
  EXPECT_TRUE(at::equal(received, rows));
  EXPECT_TRUE(at::equal(sum.at(0), rows[0]));
  EXPECT_TRUE(at::equal(halves.at(0), rows[0].to(at::kHalf)));
  EXPECT_TRUE(at::equal(gathered, rows));
  EXPECT_TRUE(at::equal(values, rows[0].to(at::kDouble)));
}

}  // namespace
}  // namespace zero
