// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state that inner optimizers keep per parameter as named tensors and values. The classes with
// an adapter of their own give their tensors themselves, others copies: see
// zero/inner_optimizers/serialized_state.cc. OptimizerAdapter::make_state() is the way back.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>

#include "zero/inner_optimizers/adapter.h"

namespace zero {

// True for a class with an adapter of its own, and for a CombinedOptimizer of such.
bool is_known(const torch::optim::Optimizer& optimizer);

// None where the optimizer has no state for `parameter`, of parameter group `group`. Throws
// c10::Error for state that cannot be stored; see OptimizerAdapter::read_state().
std::optional<InnerState> read_inner_state(const torch::optim::Optimizer& optimizer, int64_t group,
                                           const at::Tensor& parameter);

}  // namespace zero
