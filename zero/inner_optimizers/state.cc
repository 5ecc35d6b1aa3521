// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/state.h"

#include "zero/inner_optimizers/registry.h"

namespace zero {

bool is_known(const torch::optim::Optimizer& optimizer) {
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    if (adapter_of(optimizer, static_cast<int64_t>(g)).name().empty()) return false;
  }
  return true;
}

std::optional<InnerState> read_inner_state(const torch::optim::Optimizer& optimizer, int64_t group,
                                           const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end() || !found->second) return std::nullopt;
  return adapter_of(optimizer, group).read_state(optimizer, *found->second, parameter);
}

std::unique_ptr<torch::optim::OptimizerParamState> make_inner_state(
    torch::optim::Optimizer& optimizer, int64_t group, const at::Tensor& parameter,
    const InnerState& state, Moments moments) {
  return adapter_of(optimizer, group).make_state(optimizer, group, parameter, state, moments);
}

std::vector<std::string> required_state(const torch::optim::Optimizer& optimizer, int64_t group) {
  return adapter_of(optimizer, group).required_state();
}

std::vector<std::string> optional_state(const torch::optim::Optimizer& optimizer, int64_t group) {
  return adapter_of(optimizer, group).optional_state(optimizer.param_groups()[group].options());
}

std::vector<std::pair<std::string, double>> stored_option_values(
    const torch::optim::OptimizerOptions& options) {
  return adapter_of(options).option_values(options);
}

void set_option_values(torch::optim::OptimizerOptions& options,
                       const std::vector<std::pair<std::string, double>>& values) {
  adapter_of(options).set_option_values(options, values);
}

}  // namespace zero
