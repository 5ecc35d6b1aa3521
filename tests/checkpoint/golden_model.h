// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The run whose checkpoints are in tests/checkpoint/golden_checkpoint. A change here does not
// change them: their bytes are never written again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/note.h"
#include "zero/checkpoint_options.h"
#include "zero/mesh.h"
#include "zero/zero_optimizer.h"

namespace zero {

inline constexpr int kGoldenSteps = 3;  // before the save

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

inline std::unique_ptr<torch::optim::AdamW> golden_adamw(GoldenModelImpl& model) {
  return std::make_unique<torch::optim::AdamW>(std::vector<at::Tensor>{model.weight, model.bias},
                                               torch::optim::AdamWOptions(0.05).weight_decay(0.1));
}

inline void train_golden(ZeroOptimizer& optimizer, GoldenModelImpl& model, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.backward(model.loss(step));
    optimizer.step();
  }
}

inline ZeroOptions golden_average() { return ZeroOptions().ema(EmaOptions().decay(0.75)); }

// Columns [from, to) of three of a weight, beside a bias that all ranks hold whole.
struct GoldenPartImpl : torch::nn::Module {
  GoldenPartImpl(double fill, int64_t begin, int64_t end) : from(begin), to(end) {
    weight = register_parameter("weight", at::full({2, to - from}, fill));
    bias = register_parameter("bias", at::full({2}, fill));
    frozen = register_parameter("frozen", at::full({to - from}, fill), /*requires_grad=*/false);
  }
  at::Tensor loss(int step) {
    const at::Tensor target = at::arange(6.0f).view({2, 3}).sub(1.0f + static_cast<float>(step));
    return (weight - target.slice(1, from, to)).square().sum() + bias.square().sum();
  }
  int64_t from, to;
  at::Tensor weight, bias, frozen;
};
TORCH_MODULE(GoldenPart);

// `world` has two ranks, with two columns and one, or one rank.
inline std::unique_ptr<ZeroOptimizer> golden_parts(GoldenPartImpl& model, const Group& world) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const at::Tensor& p : {model.weight, model.bias}) {
    groups.emplace_back(std::vector<at::Tensor>{p}, std::make_unique<torch::optim::AdamWOptions>(
                                                        torch::optim::AdamWOptions(0.05)));
  }
  const Mesh mesh(world, {{"tp", world.world_size()}});
  const auto cut = [](const std::string& name) -> std::optional<int64_t> {
    if (name == "bias") return std::nullopt;
    return name == "weight" ? 1 : 0;
  };
  return std::make_unique<ZeroOptimizer>(
      model, std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.05)),
      mesh.group({}),
      ZeroOptions()
          .mesh_group(world)
          .placement(1, GroupPlacement().copies(world.world_size()))
          .tensor_parts({world, cut}));
}

inline void train_golden_parts(ZeroOptimizer& optimizer, GoldenPartImpl& model, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.backward(model.loss(step));
    optimizer.step();
  }
}

// Rank r of n: of each of two fused matrices of 2 and 4 columns, the r-th of n equal parts.
struct GoldenFusedImpl : torch::nn::Module {
  GoldenFusedImpl(double fill, int64_t rank, int64_t ranks)
      : columns(at::cat({at::arange(2).chunk(ranks)[rank], at::arange(2, 6).chunk(ranks)[rank]})) {
    weight = register_parameter("weight", at::full({2, 6 / ranks}, fill));
  }
  at::Tensor loss(int step) {
    const at::Tensor target = at::arange(12.0f).view({2, 6}).sub(1.0f + static_cast<float>(step));
    return (weight - target.index_select(1, columns)).square().sum();
  }
  at::Tensor columns;  // in the whole
  at::Tensor weight;
};
TORCH_MODULE(GoldenFused);

inline std::unique_ptr<ZeroOptimizer> golden_fused(GoldenFusedImpl& model, const Group& world) {
  const Mesh mesh(world, {{"tp", world.world_size()}});
  return std::make_unique<ZeroOptimizer>(
      model,
      std::make_unique<torch::optim::AdamW>(model.parameters(), torch::optim::AdamWOptions(0.05)),
      mesh.group({}),
      ZeroOptions().mesh_group(world).tensor_parts(
          {world, [](const std::string&) -> std::optional<int64_t> { return 1; },
           [](const std::string&) -> std::vector<int64_t> {
             return {2, 4};
           }}));
}

inline void train_golden_fused(ZeroOptimizer& optimizer, GoldenFusedImpl& model, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.backward(model.loss(step));
    optimizer.step();
  }
}

}  // namespace zero
