// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which share of communication is hidden behind computation. Nothing here needs a processor: layers
// sleep instead of computing, and the in-memory transport lets what a rank sends leave one piece
// after another at a limited rate. So the figure is about the order in which things are sent and
// waited for, and is the same on two cores as on two hundred.
//
//   ./bazelw run //tests/benchmarks:overlap_benchmark
//
// Three things are timed, each with the limited rate and without a limit; the difference is what is
// visible of the time that the bytes take:
//   backward       backward() and the wait for reductions, while layers sleep in the backward pass
//   step           step(), while updates of buckets sleep
//   next forward   step() and the next forward pass with overlap_gather(true), while layers sleep
#include <ATen/Parallel.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Seconds = std::chrono::duration<double>;

constexpr int kLayers = 16;
constexpr int64_t kLayerNumel = 16384;
constexpr int64_t kModelBytes = kLayers * kLayerNumel * 4;
constexpr std::chrono::milliseconds kLayerTime{20};
constexpr Seconds kComputation = kLayers * kLayerTime;
constexpr size_t kSteps = 7;

// What a layer does in backward: its weight's gradient takes kLayerTime.
struct SlowGradient : torch::autograd::Function<SlowGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({w});
    return x.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    std::this_thread::sleep_for(kLayerTime);
    return {gradients[0], at::full_like(context->get_saved_variables()[0].detach(), 1e-3)};
  }
};

struct Layer : torch::nn::Module {
  Layer() : weight(register_parameter("weight", at::zeros({kLayerNumel}))) {}
  at::Tensor weight;
};

struct Model : torch::nn::Module {
  Model() {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<Layer>()));
    }
  }
  at::Tensor loss() {
    at::Tensor x = at::zeros({});
    x.requires_grad_();
    for (const auto& layer : layers) x = SlowGradient::apply(x, layer->weight);
    return x;
  }
  std::vector<std::shared_ptr<Layer>> layers;
};

// The update of a bucket takes this long in this thread.
thread_local Seconds update_time{0};

// Updates are our own kernels: what can be slowed down is the range that names them for profilers.
void slow_down_updates() {
  at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& range)
                                     -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(range.name()).starts_with("zero::update bucket")) {
          std::this_thread::sleep_for(update_time);
        }
        return nullptr;
      }).scopes({at::RecordScope::USER_SCOPE}));
}

enum Phase : size_t { kBackward, kStep, kNextForward, kPhases };

// In seconds.
struct Figures {
  size_t buckets = 0;
  std::array<std::array<double, kSteps>, kPhases> took{};
  std::array<double, kPhases> injected{};  // By the bytes that were sent.

  // Other load on the machine only adds time, so that the least is the best estimate. The first
  // step makes buffers.
  double least(size_t phase) const {
    return *std::min_element(took[phase].begin() + 1, took[phase].end());
  }
};

struct Setting {
  int64_t bucket_bytes;
  double rate;  // In bytes a second; 0: no limit.
  bool overlap_gather;
};

// One rank's steps.
class Rank {
 public:
  Rank(const Group& group, MemoryNetwork& network, const Setting& setting)
      : network_(network),
        rank_(group.global_rank()),
        setting_(setting),
        together_(group.make_communicator("benchmark", Purpose::kControl)),
        optimizer_(
            model_,
            std::make_unique<torch::optim::SGD>(model_.parameters(), torch::optim::SGDOptions(0.1)),
            group,
            ZeroOptions()
                .bucket_bytes(setting.bucket_bytes)
                .overlap_gather(setting.overlap_gather)) {
    network_.limit_rate(rank_, setting.rate);
  }

  Figures run() {
    figures_.buckets = optimizer_.plan().buckets.size();
    // Where the next forward pass is to hide the gathers, nothing else may.
    update_time =
        setting_.overlap_gather ? Seconds(0) : kComputation / static_cast<double>(figures_.buckets);
    for (size_t step = 0; step < kSteps; ++step) {
      if (setting_.overlap_gather) {
        backward();
        time(kNextForward, step, [&] { step_and_forward(); });
      } else {
        time(kBackward, step, [&] { backward(); });
        time(kStep, step, [&] { optimizer_.step(); });
      }
    }
    return figures_;
  }

 private:
  void backward() {
    optimizer_.backward(model_.loss());
    optimizer_.reduce_gradients();
  }
  void step_and_forward() {
    optimizer_.step();
    for (const auto& layer : model_.layers) {
      optimizer_.wait_for(*layer);
      std::this_thread::sleep_for(kLayerTime);
    }
  }
  void time(Phase phase, size_t step, const std::function<void()>& body) {
    together_->all_reduce_sum(at::zeros({1}, at::kDouble), "start").wait();
    const double before = sent();
    const auto start = std::chrono::steady_clock::now();
    body();
    const Seconds took = std::chrono::steady_clock::now() - start;
    figures_.took[phase][step] = took.count();
    if (setting_.rate > 0) figures_.injected[phase] = (sent() - before) / setting_.rate;
  }
  double sent() const {
    return static_cast<double>(network_.counts(rank_).bytes_of(MemoryOp::kSend));
  }

  MemoryNetwork& network_;
  const int rank_;
  const Setting setting_;
  const std::unique_ptr<Communicator> together_;
  Model model_;
  ZeroOptimizer optimizer_;
  Figures figures_;
};

// `ratio` of communication to computation; 0: communication takes no time.
Figures measure(int world_size, int64_t bucket_bytes, double ratio) {
  const double sent = static_cast<double>(kModelBytes) * (world_size - 1) / world_size;
  const double rate = ratio == 0 ? 0 : sent / (ratio * kComputation.count());
  Figures slowest;
  for (bool overlap_gather : {false, true}) {
    RunOptions run;
    run.network = std::make_shared<MemoryNetwork>();
    std::vector<Figures> all(static_cast<size_t>(world_size));
    run_ranks(
        world_size,
        [&](const Group& group) {
          slow_down_updates();
          Rank rank(group, *run.network, {bucket_bytes, rate, overlap_gather});
          all[static_cast<size_t>(group.rank())] = rank.run();
        },
        run);
    for (const Figures& figures : all) {
      slowest.buckets = figures.buckets;
      for (size_t phase = 0; phase < kPhases; ++phase) {
        slowest.injected[phase] = std::max(slowest.injected[phase], figures.injected[phase]);
        for (size_t step = 0; step < kSteps; ++step) {
          double& most = slowest.took[phase][step];
          most = std::max(most, figures.took[phase][step]);
        }
      }
    }
  }
  return slowest;
}

void print_row(int world_size, double ratio, const Figures& without, const Figures& with) {
  // No order of sending can hide the last bucket that backward completes, the last one that is
  // updated, and the one with the first layer's parameters.
  const double bound = 1 - 1 / static_cast<double>(with.buckets);
  std::printf("| %d | %zu | %.2f | %.0f | %.0f %%", world_size, with.buckets, ratio,
              1e3 * with.injected[kBackward], 100 * bound);
  for (size_t phase = 0; phase < kPhases; ++phase) {
    const double visible = with.least(phase) - without.least(phase);
    std::printf(" | %.0f | %ld %%", 1e3 * visible,
                std::lround(100 * (1 - visible / with.injected[phase])));
  }
  std::printf(" |\n");
  std::fflush(stdout);
}

void run() {
  at::set_num_threads(1);
  std::printf(
      "| ranks | buckets | communication : computation | communication ms | at most hidden "
      "| backward: visible ms | hidden | step: visible ms | hidden "
      "| next forward: visible ms | hidden |\n"
      "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n");
  for (int world_size : {2, 4}) {
    for (int layers_per_bucket : {1, 2, 4}) {
      const int64_t bucket_bytes = layers_per_bucket * kLayerNumel * 4;
      const Figures without = measure(world_size, bucket_bytes, 0);
      for (double ratio : {0.25, 0.5, 1.0}) {
        print_row(world_size, ratio, without, measure(world_size, bucket_bytes, ratio));
      }
    }
  }
}

}  // namespace
}  // namespace zero

int main() {
  zero::run();
  return 0;
}
