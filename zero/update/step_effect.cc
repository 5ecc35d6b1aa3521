// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/step_effect.h"

#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <string>
#include <typeinfo>
#include <utility>

#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

std::string class_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

}  // namespace

StepEffect::StepEffect(const torch::optim::Optimizer& inner)
    : inner_(inner), settled_(is_known(inner)) {}

void StepEffect::begin() {
  if (settled_) return;
  for (const auto& group : inner_.param_groups()) {
    for (const at::Tensor& p : group.params()) {
      if (p.grad().defined()) stepped_.push_back({p, p.const_data_ptr(), p._version()});
    }
  }
  // Changes through data() raise no version.
  if (idle_ + 1 == kIdle && !stepped_.empty()) copy_ = stepped_.front().parameter.clone();
}

void StepEffect::end() {
  if (settled_) return;
  const std::vector<Stepped> stepped = std::exchange(stepped_, {});
  for (const Stepped& s : stepped) {
    TORCH_CHECK(s.parameter.const_data_ptr() == s.memory, "inner optimizer: expected step() of ",
                class_of(inner_),
                " to update the tensors of param_groups() in place, got other memory in one of "
                "them; update it with sub_() or copy_(), and not with set_data()");
    settled_ = settled_ || s.parameter._version() != s.version;
  }
  if (settled_ || stepped.empty() || !has_rate() || ++idle_ < kIdle) return;
  settled_ = true;
  const at::Tensor before = std::exchange(copy_, {});
  if (!at::equal(stepped.front().parameter, before)) return;
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
