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

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "tests/support/checkpoint_run.h"
#include "tests/support/peak_memory.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

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

TEST(MemoryTest, ASaveNeeds64MiBAndALoadTheStateAnd32) {
  const std::string parent = fresh_folder("memory");
  run_ranks(1, [&](const Group& group) {
    LayersImpl model;
    ZeroOptimizer optimizer(model, std::make_unique<torch::optim::AdamW>(model.parameters(), 1e-3),
                            group);
    for (const at::Tensor& p : model.parameters()) optimizer.backward(p.sum());
    optimizer.step();
    const MemoryReport memory = optimizer.memory();
    // In this layout and dtype the masters are the working parameters.
    const double state = static_cast<double>(memory.optimizer_state) / kMiB;
    const double shard = static_cast<double>(memory.working_parameters) / kMiB + state;
    double sync = 0;
    const double save =
        peak_growth([&] { sync = seconds([&] { optimizer.save_checkpoint(parent + "/a"); }); });
    const double load = peak_growth([&] { optimizer.load_checkpoint(parent + "/a"); });
    LayersImpl new_model;
    ZeroOptimizer new_optimizer(
        new_model, std::make_unique<torch::optim::AdamW>(new_model.parameters(), 1e-3), group);
    const double first_load = peak_growth([&] { new_optimizer.load_checkpoint(parent + "/a"); });
    EXPECT_LE(first_load, state + 32) << "the state, which it keeps";
    double blocked = 0;
    std::unique_ptr<PendingCheckpoint> pending;
    blocked = seconds([&] { pending = optimizer.save_checkpoint_async(parent + "/b"); });
    pending->finish();
    std::printf(
        "shard %.0f MiB; peak growth: save %.1f MiB, load %.1f MiB = %.2f of the shard\n"
        "save %.3f s, asynchronous save blocks %.3f s = %.2f of it\n",
        shard, save, load, load / shard, sync, blocked, blocked / sync);
    EXPECT_LE(save, 64);
    EXPECT_LE(load, state + 32);  // masters are read into the gradient shard
    EXPECT_LT(blocked, sync);
  });
}

// The program prints its figures and checks them.
TEST(MemoryTest, EachOfTwoProcessesNeedsThatOfItsShard) {
  const std::string parent = fresh_folder("processes");
  for (const char* inner : {"adamw", "own"}) {
    const std::string command = std::string("tests/checkpoint/checkpoint_memory_program 2 ") +
                                inner + " " + parent + "/" + inner;
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
  }
}

}  // namespace
}  // namespace zero
