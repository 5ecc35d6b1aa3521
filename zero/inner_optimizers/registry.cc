// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/registry.h"

#include "zero/combined_optimizer.h"

namespace zero {

c10::ArrayRef<const OptimizerAdapter*> registered_adapters() {
  static const OptimizerAdapter* const kAdapters[] = {
      &adamw_adapter(),    //
      &adam_adapter(),     //
      &sgd_adapter(),      //
      &rmsprop_adapter(),  //
      &adagrad_adapter(),  //
      &lion_adapter(),     //
      &muon_adapter(),     //
      &lamb_adapter(),     //
      &adafactor_adapter(),
  };
  return kAdapters;
}

const torch::optim::Optimizer& part_of(const torch::optim::Optimizer& optimizer, int64_t group) {
  const auto* combined = dynamic_cast<const CombinedOptimizer*>(&optimizer);
  return combined == nullptr ? optimizer : combined->part_of(group);
}

const OptimizerAdapter& adapter_of(const torch::optim::Optimizer& optimizer, int64_t group) {
  return adapter_of(part_of(optimizer, group));
}

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
