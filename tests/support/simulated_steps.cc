// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/simulated_steps.h"

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>

#include <string>

#include "tests/support/run_ranks.h"

namespace zero {

namespace {

class Module : public torch::nn::Module {
 public:
  explicit Module(const SimulatedOptions& options) {
    for (int64_t i = 0; i < options.parameters; ++i) {
      const std::vector<int64_t> matrix = {options.width, options.width}, vector = {options.width};
      register_parameter("p" + std::to_string(i), at::full(i % 2 == 0 ? matrix : vector, 0.5));
    }
  }
};

}  // namespace

SimulatedModel::SimulatedModel(const SimulatedOptions& options)
    : module_(std::make_shared<Module>(options)), parameters_(module_->parameters()) {
  for (const at::Tensor& parameter : parameters_) {
    gradients_.push_back(at::full_like(parameter, 1e-3));
  }
}

SimulatedSteps::SimulatedSteps(const SimulatedOptions& options) : model_(options) {
  optimizer_ = std::make_unique<ZeroOptimizer>(
      model_.module(),
      std::make_unique<torch::optim::AdamW>(model_.parameters(), torch::optim::AdamWOptions(1e-3)),
      simulated_group(options.world_size),
      ZeroOptions().stage(options.stage).layout(options.layout));
}

void SimulatedSteps::backward() { optimizer_->backward(model_.parameters(), model_.gradients()); }

void SimulatedSteps::update() {
  optimizer_->clip_grad_norm_(1.0);
  optimizer_->step();
}

void PlainSteps::step() {
  torch::autograd::backward(model_.parameters(), model_.gradients());
  for (const at::Tensor& parameter : model_.parameters()) parameter.mutable_grad().reset();
}

}  // namespace zero
