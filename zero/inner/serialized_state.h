// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// State and options of optimizer classes that this library does not know, by
// name: through the serialize() functions that torch asks of OptimizerParamState
// and OptimizerOptions. torch can read an archive only once it is written out, so
// that everything here copies, one parameter at a time.
//
// What a class keeps outside of state() is not seen, and not saved.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/inner/state.h"

namespace zero {

// What `state`, of the class `optimizer` and for `parameter`, writes: tensors of the
// parameter's shape by their names, and single values as "value:<name>" (int,
// double, bool) and "scalar:<name>" (0-dim tensor). Throws c10::Error where the class
// has no serialize(), and for everything else it may write: a tensor of another
// shape means something for the whole parameter and cannot be cut.
InnerState read_archived_state(const std::string& optimizer,
                               const torch::optim::OptimizerParamState& state,
                               const at::Tensor& parameter);

// State of this content, of the class that `optimizer` makes for parameters of
// `group`: its step() is asked for one, with a scratch parameter of one element.
// `optimizer` is afterwards as before. Throws c10::Error where the state does not
// read what it wrote.
std::unique_ptr<torch::optim::OptimizerParamState> make_archived_state(
    torch::optim::Optimizer& optimizer, int64_t group, const at::Tensor& parameter,
    const InnerState& content);

// Calls `visit(name, copy)` for every tensor that `state` writes; for none where the
// class has no serialize().
void visit_archived_tensors(
    const torch::optim::OptimizerParamState& state,
    const std::function<void(const char* name, const at::Tensor& copy)>& visit);

// The numbers that `options` writes, a pair of them as "<name>.0" and "<name>.1". Of a
// class without serialize() the learning rate, if it has one.
std::vector<std::pair<std::string, double>> archived_options(
    const torch::optim::OptimizerOptions& options);
// Sets those again. Names that the class does not have are ignored.
void set_archived_options(torch::optim::OptimizerOptions& options,
                          const std::vector<std::pair<std::string, double>>& values);

}  // namespace zero
