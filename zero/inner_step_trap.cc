// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_step_trap.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

namespace zero {

InnerStepTrap::InnerStepTrap(torch::optim::Optimizer& inner)
    : inner_(inner), parameter_(at::zeros({1}, at::TensorOptions().dtype(at::kFloat))) {
  inner_.param_groups()[0].params().push_back(parameter_);
  arm();
}

void InnerStepTrap::disarm() { parameter_.mutable_grad().reset(); }

void InnerStepTrap::arm() {
  const at::Tensor& gradient = parameter_.grad();
  if (gradient.defined() && *gradient.const_data_ptr<float>() == 1.0F) return;
  parameter_.mutable_grad() = at::ones({1}, parameter_.options());
}

bool InnerStepTrap::sprung() {
  float& value = *parameter_.mutable_data_ptr<float>();
  const bool stepped = value != 0.0F;
  if (stepped) {
    value = 0.0F;
    // The state that the call made belongs to no parameter of the model.
    inner_.state().erase(parameter_.unsafeGetTensorImpl());
  }
  arm();
  return stepped;
}

}  // namespace zero
