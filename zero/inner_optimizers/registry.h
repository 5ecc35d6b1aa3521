// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The adapters of all classes, and how to find the one of an object.
#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/optim/optimizer.h>

#include <optional>

#include "zero/inner_optimizers/adapter.h"

namespace zero {

// In the order in which errors name the classes.
c10::ArrayRef<const OptimizerAdapter*> registered_adapters();

// What updates parameter group `group`: in a CombinedOptimizer, one of its parts.
const torch::optim::Optimizer& part_of(const torch::optim::Optimizer& optimizer, int64_t group);

// Of classes that this library does not know: see serialized_state.cc.
const OptimizerAdapter& serialized_adapter();

// The adapter of exactly the class of an optimizer, its options or a state; serialized_adapter()
// for a class that is not in the registry.
template <typename Object>
const OptimizerAdapter& adapter_of(const Object& object) {
  for (const OptimizerAdapter* adapter : registered_adapters()) {
    if (adapter->is_class_of(object)) return *adapter;
  }
  return serialized_adapter();
}
// The adapter of part_of(optimizer, group).
const OptimizerAdapter& adapter_of(const torch::optim::Optimizer& optimizer, int64_t group);

// True for a class with an adapter of its own, and for a CombinedOptimizer of such.
bool is_known(const torch::optim::Optimizer& optimizer);

// None where the optimizer has no state for `parameter`, of parameter group `group`. Throws
// c10::Error for state that cannot be stored; see OptimizerAdapter::read_state().
std::optional<InnerState> read_inner_state(const torch::optim::Optimizer& optimizer, int64_t group,
                                           const at::Tensor& parameter);

// In the file of each class in this folder.
const OptimizerAdapter& adafactor_adapter();
const OptimizerAdapter& adagrad_adapter();
const OptimizerAdapter& adam_adapter();
const OptimizerAdapter& adamw_adapter();
const OptimizerAdapter& lamb_adapter();
const OptimizerAdapter& lion_adapter();
const OptimizerAdapter& muon_adapter();
const OptimizerAdapter& rmsprop_adapter();
const OptimizerAdapter& sgd_adapter();
}  // namespace zero
