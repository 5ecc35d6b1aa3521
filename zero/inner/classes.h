// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What we must know of torch::optim's classes one by one: which may work on
// flat pieces of parameters, how to compare options, what their state holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zero {

// Throws c10::Error for LBFGS, for a class that is not torch's AdamW, Adam,
// SGD, RMSprop or Adagrad unless `elementwise`, and for state that is not empty.
// Adagrad's, which its constructor makes, must be unused.
void check_inner_optimizer(const torch::optim::Optimizer& optimizer, bool elementwise);

// "AdamW" and so on; the demangled type for other classes.
std::string optimizer_name(const torch::optim::Optimizer& optimizer);

// Gives `segment` the state that the optimizer's constructor makes for a
// parameter of group `group`. Only Adagrad makes any.
void make_initial_state(torch::optim::Optimizer& optimizer, int64_t group,
                        const at::Tensor& segment);

// True when both have equal values, or are of a class we cannot compare.
bool equal_options(const torch::optim::OptimizerOptions& a,
                   const torch::optim::OptimizerOptions& b);

// The options of a class we know by the names of their accessors, for
// comparing ranks and for checkpoints. Empty for other classes.
std::vector<std::pair<std::string, double>> option_values(
    const torch::optim::OptimizerOptions& options);

// The fewest digits that read back as the same double.
std::string exact_text(double value);

// Options in words: "lr 0.1 weight_decay 0.01".
std::string options_text(const torch::optim::OptimizerOptions& options);

// Calls `visit(name, tensor)` for every defined tensor of `state`, under the
// name of its accessor; for copies of them where we do not know the class, and for
// none where that has no serialize().
void visit_state_tensors(const torch::optim::OptimizerParamState& state,
                         const std::function<void(const char* name, const at::Tensor&)>& visit);

}  // namespace zero
