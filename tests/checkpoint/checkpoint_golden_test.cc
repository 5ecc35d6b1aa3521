// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint that two ranks wrote before manifests had optional fields still
// loads. The files are in tests/checkpoint/golden_checkpoint and are never written again.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <filesystem>
#include <memory>
#include <string>

#include "tests/support/run_ranks.h"
#include "zero/checkpoint.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr char kGolden[] = "tests/checkpoint/golden_checkpoint/version-1";
constexpr int kSavedSteps = 3;

struct GoldenModelImpl : torch::nn::Module {
  explicit GoldenModelImpl(double fill) {
    weight = register_parameter("weight", at::full({2, 3}, fill));
    bias = register_parameter("bias", at::full({2}, fill));
    frozen = register_parameter("frozen", at::full({2}, fill, at::kHalf), /*requires_grad=*/false);
    counter = register_buffer("counter", at::full({1}, static_cast<int64_t>(fill), at::kLong));
  }
  at::Tensor loss(int step) {
    const at::Tensor x = at::arange(12.0f).view({4, 3}).sub(4.0f + static_cast<float>(step));
    return at::linear(x, weight, bias).square().mean();
  }
  at::Tensor weight, bias, frozen, counter;
};
TORCH_MODULE(GoldenModel);

std::unique_ptr<torch::optim::AdamW> adamw(GoldenModelImpl& model) {
  return std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{model.weight, model.bias},
                                               torch::optim::AdamWOptions(0.05).weight_decay(0.1));
}

void train(ZeroOptimizer& optimizer, GoldenModelImpl& model, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.backward(model.loss(step));
    optimizer.step();
  }
}

// Plain torch over the whole run, on one rank.
GoldenModel trained(int steps) {
  GoldenModel model(0.5);
  const auto optimizer = adamw(*model);
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    model->loss(step).backward();
    optimizer->step();
  }
  return model;
}

void expect_near(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_LE((got - expected).abs().max().item<double>(), 1e-6) << got << expected;
}

TEST(GoldenTest, VersionOneLoadsOnAnyNumberOfRanksAndGoesOn) {
  const GoldenModel saved = trained(kSavedSteps);
  const GoldenModel later = trained(kSavedSteps + 4);
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      GoldenModel model(7);
      ZeroOptimizer optimizer(*model, adamw(*model), group,
                              ZeroOptions().loss_scaler(LossScalerOptions()));
      const LoadReport report = optimizer.load_checkpoint(kGolden);
      EXPECT_EQ(report.metadata.at("epoch"), "3");
      EXPECT_EQ(report.world_size, 2);
      EXPECT_EQ(optimizer.stats().steps, kSavedSteps);
      EXPECT_EQ(optimizer.loss_scale(), 1024);
      EXPECT_EQ(model->frozen[1].item<double>(), 0.5);
      EXPECT_EQ(model->counter.item<int64_t>(), 0);
      expect_near(model->weight.detach(), saved->weight.detach());
      expect_near(model->bias.detach(), saved->bias.detach());
      train(optimizer, *model, kSavedSteps, kSavedSteps + 4);
      expect_near(model->weight.detach(), later->weight.detach());
      expect_near(model->bias.detach(), later->bias.detach());
    });
  }
}

TEST(GoldenTest, VersionOneIsVerifiedFoundAndExported) {
  verify_checkpoint(kGolden);
  EXPECT_EQ(latest("tests/checkpoint/golden_checkpoint"), kGolden);
  const std::string model = ::testing::TempDir() + "/golden.safetensors";
  std::filesystem::remove(model);
  export_model(kGolden, model);
  GoldenModel filled(7);
  EXPECT_TRUE(import_model(model, *filled).empty());
  expect_near(filled->weight.detach(), trained(kSavedSteps)->weight.detach());
}

}  // namespace
}  // namespace zero
