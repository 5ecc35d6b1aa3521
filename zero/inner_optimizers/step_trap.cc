// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/step_trap.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

int64_t group_for_matrix(const torch::optim::Optimizer& inner) {
  const auto& groups = inner.param_groups();
  for (int64_t g = 0; g < std::ssize(groups); ++g) {
    if (adapter_of(inner, g).takes_any_matrix(groups[g].options())) return g;
  }
  return 0;
}

}  // namespace

InnerStepTrap::InnerStepTrap(torch::optim::Optimizer& inner)
    : inner_(inner),
      group_(group_for_matrix(inner)),
      // A matrix, since some classes take nothing else.
      parameter_(at::zeros({1, 1}, at::TensorOptions().dtype(at::kFloat))),
      gradient_(at::ones({1, 1}, parameter_.options())),
      value_(parameter_.mutable_data_ptr<float>()),
      gradient_value_(gradient_.mutable_data_ptr<float>()) {
  inner_.param_groups()[group_].params().push_back(parameter_);
  make_initial_state(inner_, group_, parameter_);  // which a step() of the class expects
  arm();
}

void InnerStepTrap::disarm() { parameter_.mutable_grad().reset(); }

void InnerStepTrap::arm() {
  *gradient_value_ = 1.0F;
  if (!parameter_.grad().is_same(gradient_)) parameter_.mutable_grad() = gradient_;
}

bool InnerStepTrap::sprung() {
  const bool stepped = *value_ != 0.0F;
  if (stepped) {
    *value_ = 0.0F;
    // The state that the call made belongs to no parameter of the model.
    inner_.state().erase(parameter_.unsafeGetTensorImpl());
    make_initial_state(inner_, group_, parameter_);
  }
  arm();
  return stepped;
}

}  // namespace zero
