// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What construction and the first step need at most, by the system's count.
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <memory>

#include "tests/support/peak_memory.h"
#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Neither construction nor the first step needs more than what stays afterwards and the buckets;
// the slack is for the gradients of a few layers.
TEST(PeakMemoryTest, ConstructionAndTheFirstStepHaveNoPeakOfTheirOwn) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    run_ranks(1, [&](const Group& group) {
      constexpr double kWorking = 24, kSlack = 12;  // MiB
      torch::nn::Sequential model;
      // Measured too, so that its memory goes back to the system as soon as it is freed.
      peak_growth([&] {
        for (int i = 0; i < 12; ++i) {
          torch::nn::Linear layer(torch::nn::LinearOptions(1024, 1024).bias(false));
          layer->to(at::kBFloat16);
          model->push_back(layer);
        }
      });
      std::unique_ptr<ZeroOptimizer> optimizer;
      const double made = peak_growth([&] {
        optimizer = std::make_unique<ZeroOptimizer>(
            *model, std::make_unique<torch::optim::AdamW>(model->parameters(), 1e-3), group,
            ZeroOptions().layout(layout).bucket_bytes(4 << 20));
      });
      const auto mib = [&] { return static_cast<double>(optimizer->memory().total()) / kMiB; };
      const double after = mib();
      // Working parameters were there before, in the module.
      EXPECT_LE(made, after - kWorking + kSlack);
      const double first = peak_growth([&] {
        for (const at::Tensor& p : model->parameters()) optimizer->backward(p.sum());
        optimizer->step();
      });
      const double buckets = static_cast<double>(optimizer->memory().peak_buckets) / kMiB;
      EXPECT_LE(first, mib() - after + buckets + kSlack);
      std::printf("peak growth: construction %.0f MiB of %.0f, first step %.0f MiB of %.0f\n", made,
                  after - kWorking, first, mib() - after);
    });
  }
}

// freeze() and recover() make everything anew. The old masters, state and gradients are freed
// first, and the old arena with the last parameter that leaves it.
TEST(PeakMemoryTest, AChangeOfParametersNeedsACopyOfTheShardAndOfTheMastersAtMost) {
  for (const c10::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    run_ranks(1, [&](const Group& group) {
      constexpr double kParameters = 12, kSlack = 12;  // in 2^20
      torch::nn::Sequential model;
      std::unique_ptr<ZeroOptimizer> optimizer;
      peak_growth([&] {
        for (int i = 0; i < 12; ++i) {
          torch::nn::Linear layer(torch::nn::LinearOptions(1024, 1024).bias(false));
          layer->to(dtype);
          model->push_back(layer);
        }
        optimizer = std::make_unique<ZeroOptimizer>(
            *model, std::make_unique<torch::optim::AdamW>(model->parameters(), 1e-3), group,
            ZeroOptions().bucket_bytes(4 << 20));
        for (const at::Tensor& p : model->parameters()) optimizer->backward(p.sum());
        optimizer->step();
      });
      const double grown = peak_growth([&] { optimizer->freeze({model->parameters()[3]}); });
      std::printf("peak growth of freeze(): %.0f MiB\n", grown);
      EXPECT_LE(grown, kParameters * (12 + 4) + kSlack);
      optimizer->backward(model->parameters()[0].sum());
      optimizer->step();
    });
  }
}

}  // namespace
}  // namespace zero
