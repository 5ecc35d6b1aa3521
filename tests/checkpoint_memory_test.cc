// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a save and a load cost: memory beyond what the optimizer holds, and the
// time that an asynchronous save blocks.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "tests/checkpoint_run.h"
#include "tests/run_ranks.h"
#include "zero/pending_checkpoint.h"

namespace zero {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// Anonymous memory of this process, in MiB: without pages of files, which the
// kernel takes back when it needs them.
double anonymous_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "RssAnon:") continue;
    double kib = 0;
    status >> kib;
    return kib / 1024.0;
  }
  return 0;
}

// The most that `work` adds to it, in MiB.
double peak_growth(const std::function<void()>& work) {
  const double before = anonymous_mib();
  std::atomic<double> peak{before};
  std::atomic<bool> done{false};
  std::thread sampler([&] {
    while (!done) {
      const double now = anonymous_mib();
      if (now > peak) peak = now;
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  });
  work();
  done = true;
  sampler.join();
  return peak - before;
}

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < 12; ++i) {
      auto layer = torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false));
      register_module("layer" + std::to_string(i), layer);
    }
  }
};

TEST(MemoryTest, SaveAndLoadNeedTheShardAnd64MiBAtMost) {
  const std::string parent = fresh_folder("memory");
  run_ranks(1, [&](const Group& group) {
    LayersImpl model;
    ZeroOptimizer optimizer(model, std::make_unique<torch::optim::AdamW>(model.parameters(), 1e-3),
                            group);
    for (const at::Tensor& p : model.parameters()) optimizer.backward(p.sum());
    optimizer.step();
    const MemoryReport memory = optimizer.memory();
    // In this layout and dtype the masters are the working parameters.
    const double shard =
        static_cast<double>(memory.working_parameters + memory.optimizer_state) / kMiB;
    double sync = 0;
    const double save =
        peak_growth([&] { sync = seconds([&] { optimizer.save_checkpoint(parent + "/a"); }); });
    const double load = peak_growth([&] { optimizer.load_checkpoint(parent + "/a"); });
    double blocked = 0;
    std::unique_ptr<PendingCheckpoint> pending;
    blocked = seconds([&] { pending = optimizer.save_checkpoint_async(parent + "/b"); });
    pending->finish();
    std::printf(
        "shard %.0f MiB; peak growth: save %.1f MiB, load %.1f MiB = %.2f of the shard\n"
        "save %.3f s, asynchronous save blocks %.3f s = %.2f of it\n",
        shard, save, load, load / shard, sync, blocked, blocked / sync);
    EXPECT_LE(save, 64);
    EXPECT_LE(load, shard + 64);
    EXPECT_LT(blocked, sync);
  });
}

}  // namespace
}  // namespace zero
