// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state that inner optimizers keep per parameter as named tensors and values, and back;
// likewise their options as named numbers. The classes with an adapter of their own give their
// tensors themselves, others copies: see zero/inner_optimizers/serialized_state.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/inner_optimizers/adapter.h"

namespace zero {

// True for a class with an adapter of its own, and for a CombinedOptimizer of such.
bool is_known(const torch::optim::Optimizer& optimizer);

// None where the optimizer has no state for `parameter`, of parameter group `group`. Throws
// c10::Error for state that cannot be stored; see OptimizerAdapter::read_state().
std::optional<InnerState> read_inner_state(const torch::optim::Optimizer& optimizer, int64_t group,
                                           const at::Tensor& parameter);
// Returns the state that `optimizer` would keep for `parameter`, of parameter group `group`, in
// that state: see OptimizerAdapter::make_state().
std::unique_ptr<torch::optim::OptimizerParamState> make_inner_state(
    torch::optim::Optimizer& optimizer, int64_t group, const at::Tensor& parameter,
    const InnerState& state, Moments moments = Moments::kFloat32);

// The names that a step reads of a parameter of group `group` that has any state: tensors and
// "step". Empty for classes without an adapter of their own.
std::vector<std::string> required_state(const torch::optim::Optimizer& optimizer, int64_t group);

// The names of the tensors that a step reads besides, with the options of that group, and that are
// zeros in a new state.
std::vector<std::string> optional_state(const torch::optim::Optimizer& optimizer, int64_t group);

// The options by name, for checkpoints.
std::vector<std::pair<std::string, double>> stored_option_values(
    const torch::optim::OptimizerOptions& options);
// Sets those. Names that the class does not have are ignored.
void set_option_values(torch::optim::OptimizerOptions& options,
                       const std::vector<std::pair<std::string, double>>& values);

}  // namespace zero
