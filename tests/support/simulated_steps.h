// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Training steps of one rank of a job of any size, alone in this process: for
// measuring what the optimizer itself costs, and how that grows with the ranks.
//
//   SimulatedSteps job({.world_size = 16384});
//   job.step();
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "zero/zero_optimizer.h"

namespace zero {

struct SimulatedOptions {
  int world_size = 8;
  int64_t stage = 2;
  Layout layout = Layout::kContiguous;
  // fp32, by turns a matrix of `width` columns and a vector. Small, so that kernels do not hide
  // what is spent on each parameter.
  int64_t parameters = 200;
  int64_t width = 16;
};

// Small parameters with a gradient for each.
class SimulatedModel {
 public:
  explicit SimulatedModel(const SimulatedOptions& options);
  torch::nn::Module& module() const { return *module_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& gradients() const { return gradients_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> gradients_;
};

class SimulatedSteps {
 public:
  explicit SimulatedSteps(const SimulatedOptions& options);

  // No model is run: backward starts at the parameters with given gradients, so that all of
  // autograd that is left is the accumulation into p.grad().
  void backward();
  // Clip and step.
  void update();
  void step() {
    backward();
    update();
  }

  const ZeroOptimizer& optimizer() const { return *optimizer_; }

 private:
  SimulatedModel model_;
  std::unique_ptr<ZeroOptimizer> optimizer_;
};

// The same backward pass without an optimizer, to subtract.
class PlainSteps {
 public:
  explicit PlainSteps(const SimulatedOptions& options) : model_(options) {}
  void step();

 private:
  SimulatedModel model_;
};

}  // namespace zero
