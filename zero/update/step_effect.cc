// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/step_effect.h"

#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <string>
#include <typeinfo>

#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

std::string class_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

}  // namespace

StepEffect::StepEffect(const torch::optim::Optimizer& inner)
    : inner_(inner), settled_(is_known(inner)) {}

void StepEffect::begin(const std::vector<at::Tensor>& parameters) {
  if (settled_) return;
  memory_.clear();
  versions_.clear();
  for (const at::Tensor& p : parameters) {
    memory_.push_back(p.const_data_ptr());
    versions_.push_back(p._version());
  }
  // Changes through data() raise no version.
  if (idle_ + 1 == kIdle && !parameters.empty()) copy_ = parameters.front().clone();
}

void StepEffect::end(const std::vector<at::Tensor>& parameters) {
  if (settled_ || parameters.empty()) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK(parameters[i].const_data_ptr() == memory_[i],
                "inner optimizer: expected step() of ", class_of(inner_),
                " to update the tensors of param_groups() in place, got other memory in one of "
                "them; update it with sub_() or copy_(), and not with set_data()");
    if (parameters[i]._version() != versions_[i]) settled_ = true;
  }
  if (settled_ || !has_rate()) return;
  if (++idle_ < kIdle) return;
  settled_ = true;
  if (!at::equal(parameters.front(), copy_)) return;
  TORCH_WARN("inner optimizer: ", kIdle, " calls of step() of ", class_of(inner_),
             " have changed no tensor of its param_groups(). A class that keeps its parameters, or "
             "a flat buffer of them, in a member updates memory that nothing reads: let its step() "
             "update what it finds in param_groups(), in place. This is said once");
}

bool StepEffect::has_rate() const {
  return std::ranges::any_of(inner_.param_groups(), [](const auto& group) {
    const auto values = adapter_of(group.options()).step_values(group.options());
    const auto rate =
        std::ranges::find(values, "lr", [](const auto& value) { return value.first; });
    return rate == values.end() || rate->second != 0.0;
  });
}

}  // namespace zero
