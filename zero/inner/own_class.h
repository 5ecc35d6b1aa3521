// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The constructors and steps of this library's own optimizer classes share these parts.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace zero {

// Runs `check` on the options of every group.
template <class Options>
void check_groups(std::vector<torch::optim::OptimizerParamGroup>& groups,
                  void (*check)(const Options&)) {
  for (auto& group : groups) check(static_cast<const Options&>(group.options()));
}

// Returns the loss of `closure`, which computes gradients, or an undefined tensor without one.
inline at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  at::AutoGradMode enable_grad(true);
  return closure();
}

// Calls update(parameter, gradient) for each parameter of `group` that has a gradient. Throws
// c10::Error, in the name of the class `optimizer`, for a sparse one.
template <class Update>
void for_each_gradient(torch::optim::OptimizerParamGroup& group, const char* optimizer,
                       const Update& update) {
  for (at::Tensor& p : group.params()) {
    const at::Tensor& gradient = p.grad();
    if (!gradient.defined()) continue;
    TORCH_CHECK(!gradient.is_sparse(), optimizer, ": expected dense gradients, got a sparse one");
    update(p, gradient);
  }
}

}  // namespace zero
