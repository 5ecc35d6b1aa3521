// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Names, checks and options of inner optimizers, whatever their class. The knowledge of each class
// is in its adapter; see zero/inner_optimizers/adapter.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

namespace zero {

// Throws c10::Error for LBFGS; for parameter groups whose parameters are cut, while their class
// needs whole ones, or has no adapter of its own and is not `elementwise`; and for state that is
// not empty. State that the constructor makes, as Adagrad's does, must be unused.
//   whole  per parameter group: true where each parameter has one owner
void check_inner_optimizer(const torch::optim::Optimizer& optimizer, bool elementwise,
                           const std::vector<bool>& whole);

// Per parameter group: true for a class that needs whole parameters.
std::vector<bool> needs_whole_parameters(const torch::optim::Optimizer& optimizer);

// "AdamW" and so on; the demangled type for classes without an adapter of their own. The names of
// the parts of a CombinedOptimizer, with " + " between them.
std::string optimizer_name(const torch::optim::Optimizer& optimizer);

// The classes with an adapter: "AdamW, Adam, SGD, RMSprop or Adagrad", then `of_torch`, then those
// that are not torch's.
std::string known_classes(const std::string& of_torch = {});

// Throws c10::Error, with `name`, for a parameter that the class of `group` refuses in a group with
// `options`. `group` may be the next one of an optimizer of one class.
void check_parameter(const torch::optim::Optimizer& optimizer, int64_t group,
                     const torch::optim::OptimizerOptions& options, const at::Tensor& parameter,
                     const std::string& name);

// Throws c10::Error, with the number of the group, for options with which no step can go on: a NaN,
// a learning rate that is not finite, and what a constructor of this library's classes refuses.
// Of a class without an adapter of its own the learning rate alone is looked at.
void check_options(const std::vector<torch::optim::OptimizerParamGroup>& groups);

// Gives `segment` the state that the optimizer's constructor makes for a parameter of group
// `group`, if it makes any.
void make_initial_state(torch::optim::Optimizer& optimizer, int64_t group,
                        const at::Tensor& segment);

// The fewest digits that read back as the same double.
std::string exact_text(double value);

// The options by the names of their accessors: "lr 0.1 weight_decay 0.01". Ranks compare them at
// construction.
std::string options_text(const torch::optim::OptimizerOptions& options);
// Those that ranks compare before each step: all, but the learning rate alone of a class without an
// adapter of its own.
std::string step_options_text(const torch::optim::OptimizerOptions& options);

}  // namespace zero
