// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// All that this library knows of one class of inner optimizer. Each class has a file in this folder
// (Adam and AdamW share one) and a line in registry.cc; the class that no line names has
// serialized_state.cc.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/memory.h"
#include "zero/inner_optimizers/fused_update.h"

namespace zero {

// The state of a parameter, or of a piece of one, in the form that checkpoints store and cut.
struct InnerState {
  // One value per element of the parameter, in its shape, by the name of the accessor.
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  // One for all elements, shape [1]. Classes in the registry have "step", int64, if they count.
  std::vector<std::pair<std::string, at::Tensor>> values = {};
  // Of whole parameters, and never cut: tensors of any other size. They are stored and given back
  // as 1-D.
  std::vector<std::pair<std::string, at::Tensor>> uncut = {};
};

// What a step() rounds the averages of one parameter by, and where: see kernels/stored_state.h.
struct MomentRounding {
  int64_t step = 0;
  int64_t parameter = 0;  // its number
  kernels::Stream stream = {};
};

class OptimizerAdapter {
 public:
  using Optimizer = torch::optim::Optimizer;
  using Options = torch::optim::OptimizerOptions;
  using State = torch::optim::OptimizerParamState;
  using OptionValues = std::vector<std::pair<std::string, double>>;
  using VisitTensor = std::function<void(const char* name, const at::Tensor& tensor)>;

  virtual ~OptimizerAdapter() = default;

  // ---- The class ----

  // Its name in checkpoints and errors, with its namespace unless that is torch::optim. Empty for
  // classes outside of the registry, whose C++ type is their name.
  virtual std::string name() const = 0;
  // True for an object of exactly this class; for its options and its state, also when they belong
  // to an optimizer of another class.
  virtual bool is_class_of(const Optimizer& optimizer) const = 0;
  virtual bool is_class_of(const Options& options) const = 0;
  virtual bool is_class_of(const State& state) const = 0;

  // True if step() looks at a parameter's shape or norm, so that it computes something else on a
  // piece of one.
  virtual bool needs_whole_parameters() const { return false; }
  // Throws c10::Error for a parameter that the constructor refuses in a group with these options.
  virtual void check_parameter(const Options& /*options*/, const at::Tensor& /*parameter*/) const {}
  // True if step() takes a matrix of any shape in a group with these options.
  virtual bool takes_any_matrix(const Options& /*options*/) const { return true; }
  // The cost of a step of this parameter, in a unit of the class.
  virtual int64_t step_cost(const at::Tensor& parameter) const { return parameter.numel(); }

  // ---- Options ----

  // Throws c10::Error for options that the constructor refuses, of this library's own classes.
  virtual void check_options(const Options& /*options*/) const {}
  // The options by the names of their accessors, for checkpoints.
  virtual OptionValues option_values(const Options& options) const = 0;
  // Sets those. Names that the class does not have are ignored.
  virtual void set_option_values(Options& options, const OptionValues& values) const = 0;
  // Those of them that each step checks, and ranks compare before it.
  virtual OptionValues step_values(const Options& options) const { return option_values(options); }
  // True when both have equal values, as far as they can be compared at each step.
  virtual bool equal_options(const Options& a, const Options& b) const = 0;

  // What a step computes with on `device`, where ranks must agree on it and the options leave it
  // open. Empty for nothing.
  virtual std::string arithmetic(const Options&, at::Device) const { return {}; }

  // ---- State ----

  // The state that the constructor makes for a parameter of group `group`; null for none.
  virtual std::unique_ptr<State> initial_state(const Optimizer& /*optimizer*/, int64_t /*group*/,
                                               const at::Tensor& /*parameter*/) const {
    return nullptr;
  }
  // True for state that the constructor made and no step has used.
  virtual bool is_unused(const State& /*state*/) const { return false; }
  // Calls `visit` for every defined tensor as it is stored, or a copy of it, for counting bytes.
  virtual void visit_tensors(const State& state, const VisitTensor& visit) const = 0;
  // `state` of `parameter` for checkpoints. Throws c10::Error for state that cannot be stored.
  virtual InnerState read_state(const Optimizer& optimizer, const State& state,
                                const at::Tensor& parameter) const = 0;
  // The inverse. May take over the tensors, and leaves the groups and the state of `optimizer` as
  // they were. A class outside of the registry makes new state in its step(), which runs once over
  // one parameter of one element, and counts that if it counts calls in a member. Throws c10::Error
  // for a name or dtype that the class does not have. `moments`: how a class with a fused kernel,
  // or with stores_moments(), stores its averages; kFloat32 for others.
  virtual std::unique_ptr<State> make_state(Optimizer& optimizer, int64_t group,
                                            const at::Tensor& parameter, const InnerState& content,
                                            Moments moments) const = 0;
  // The names that step() needs of a parameter that has any state.
  virtual std::vector<std::string> required_state() const { return {}; }
  // The names of the tensors that a step reads with these options only, zeros in a new state.
  virtual std::vector<std::string> optional_state(const Options&) const { return {}; }
  // Makes those of them that `state` of `parameter` lacks.
  virtual void complete_state(State& /*state*/, const Options& /*options*/,
                              const at::Tensor& /*parameter*/) const {}

  // ---- Step ----

  // Null for a class without a fused kernel.
  virtual const FusedUpdate* fused() const { return nullptr; }
  // True for a class without one whose step() itself stores averages as ZeroOptions::moments says.
  virtual bool stores_moments() const { return false; }
  // Comes before each step() of such a class that updates `master`, with averages in fewer bytes
  // than fp32. Makes state where there is none.
  virtual void prepare_moments(Optimizer& /*optimizer*/, const at::Tensor& /*master*/,
                               Moments /*moments*/, const MomentRounding& /*rounding*/) const {}
};

}  // namespace zero
