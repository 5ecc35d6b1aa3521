// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The constructors and steps of this library's own optimizer classes share these parts.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

namespace zero {

// Gives `groups`, which libtorch made from `given`, the options of `given` where it has some, and
// runs `check` on those of every group. libtorch 2.13 and 2.15 keep them for their own classes
// alone: the groups of all others have the defaults. Throws c10::Error for options of another
// class.
template <class Options>
void take_options(std::vector<torch::optim::OptimizerParamGroup>& groups,
                  const std::vector<torch::optim::OptimizerParamGroup>& given,
                  void (*check)(const Options&)) {
  for (size_t g = 0; g < groups.size(); ++g) {
    if (given[g].has_options()) groups[g].set_options(given[g].options().clone());
    const auto* options = dynamic_cast<const Options*>(&groups[g].options());
    TORCH_CHECK(options != nullptr, "parameter group ", g, ": expected options of class ",
                c10::demangle(typeid(Options).name()), ", got ",
                c10::demangle(typeid(groups[g].options()).name()),
                "; give it those, or none to have the defaults");
    check(*options);
  }
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

// A step() that calls update(parameter, gradient, options) for each of all groups.
template <class Options, class Update>
at::Tensor step_each(const torch::optim::Optimizer::LossClosure& closure, const char* optimizer,
                     std::vector<torch::optim::OptimizerParamGroup>& groups, const Update& update) {
  at::NoGradGuard no_grad;
  const at::Tensor loss = loss_of(closure);
  for (auto& group : groups) {
    const auto& options = static_cast<const Options&>(group.options());
    for_each_gradient(group, optimizer, [&](at::Tensor& p, const at::Tensor& gradient) {
      update(p, gradient, options);
    });
  }
  return loss;
}

// The state in `slot`, which `fill` is called with where it is new.
template <class State, class Fill>
State& state_in(std::unique_ptr<torch::optim::OptimizerParamState>& slot, const Fill& fill) {
  if (!slot) {
    auto made = std::make_unique<State>();
    fill(*made);
    slot = std::move(made);
  }
  return static_cast<State&>(*slot);
}

}  // namespace zero
