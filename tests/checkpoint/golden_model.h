// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The run whose checkpoints are in tests/checkpoint/golden_checkpoint. A change here does not
// change them: their bytes are never written again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/stateful.h"
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

// An object that a save includes.
struct GoldenNote : Stateful {
  explicit GoldenNote(std::string content) : text(std::move(content)) {}
  std::string state() const override { return text; }
  void set_state(const std::string& state) override { text = state; }
  std::string text;
};

}  // namespace zero
