// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state that torch's optimizers keep per parameter as named tensors and a
// step count, and back; likewise their options as named numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zero {

struct InnerState {
  std::optional<int64_t> step;                              // none where the class does not count
  std::vector<std::pair<std::string, at::Tensor>> tensors;  // by the name of the accessor
};

// Throws c10::Error unless `optimizer` is torch's AdamW, Adam, SGD, RMSprop or
// Adagrad: of other classes we cannot make state.
void check_state_can_be_stored(const torch::optim::Optimizer& optimizer);

// None where the optimizer has no state for `parameter`. The tensors are the
// optimizer's own.
std::optional<InnerState> read_inner_state(const torch::optim::Optimizer& optimizer,
                                           const at::Tensor& parameter);
// What `optimizer` would keep for a parameter in that state. Takes over the
// tensors. Throws c10::Error for a name that the class does not have.
std::unique_ptr<torch::optim::OptimizerParamState> make_inner_state(
    const torch::optim::Optimizer& optimizer, const InnerState& state);

// Sets what option_values() gives. Names that the class does not have are ignored.
void set_option_values(torch::optim::OptimizerOptions& options,
                       const std::vector<std::pair<std::string, double>>& values);

}  // namespace zero
