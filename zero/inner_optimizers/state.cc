// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/state.h"

#include "zero/inner_optimizers/registry.h"

namespace zero {

bool is_known(const torch::optim::Optimizer& optimizer) {
  for (int64_t g = 0; g < std::ssize(optimizer.param_groups()); ++g) {
    if (adapter_of(optimizer, g).name().empty()) return false;
  }
  return true;
}

std::optional<InnerState> read_inner_state(const torch::optim::Optimizer& optimizer, int64_t group,
                                           const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end() || !found->second) return std::nullopt;
  return adapter_of(optimizer, group).read_state(optimizer, *found->second, parameter);
}

}  // namespace zero
