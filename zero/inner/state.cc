// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner/state.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <map>
#include <memory>

#include "zero/inner/classes.h"
#include "zero/inner/serialized_state.h"

namespace zero {
namespace {

// Hands out the tensors of a state by name, and notices what nobody asked for.
class NamedTensors {
 public:
  explicit NamedTensors(const InnerState& state)
      : tensors_(state.tensors.begin(), state.tensors.end()) {}
  at::Tensor take(const char* name) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return {};
    at::Tensor tensor = found->second;
    tensors_.erase(found);
    return tensor;
  }
  void check_empty(const std::string& optimizer) const {
    TORCH_CHECK(tensors_.empty(), "state: expected tensors that ", optimizer, " has, got ",
                tensors_.begin()->first);
  }

 private:
  std::map<std::string, at::Tensor> tensors_;
};

template <typename State>
std::unique_ptr<torch::optim::OptimizerParamState> adam(NamedTensors& tensors, int64_t step) {
  auto state = std::make_unique<State>();
  state->step(step);
  state->exp_avg(tensors.take("exp_avg"));
  state->exp_avg_sq(tensors.take("exp_avg_sq"));
  state->max_exp_avg_sq(tensors.take("max_exp_avg_sq"));
  return state;
}

std::unique_ptr<torch::optim::OptimizerParamState> make_state(const std::string& optimizer,
                                                              NamedTensors& tensors, int64_t step) {
  if (optimizer == "AdamW") return adam<torch::optim::AdamWParamState>(tensors, step);
  if (optimizer == "Adam") return adam<torch::optim::AdamParamState>(tensors, step);
  if (optimizer == "SGD") {
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(tensors.take("momentum_buffer"));
    return state;
  }
  if (optimizer == "RMSprop") {
    auto state = std::make_unique<torch::optim::RMSpropParamState>();
    state->step(step);
    state->square_avg(tensors.take("square_avg"));
    state->momentum_buffer(tensors.take("momentum_buffer"));
    state->grad_avg(tensors.take("grad_avg"));
    return state;
  }
  auto state = std::make_unique<torch::optim::AdagradParamState>();
  state->step(step);
  state->sum(tensors.take("sum"));
  return state;
}

std::optional<int64_t> step_of(const torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  if (const auto* s = dynamic_cast<const AdamWParamState*>(&state)) return s->step();
  if (const auto* s = dynamic_cast<const AdamParamState*>(&state)) return s->step();
  if (const auto* s = dynamic_cast<const RMSpropParamState*>(&state)) return s->step();
  if (const auto* s = dynamic_cast<const AdagradParamState*>(&state)) return s->step();
  return std::nullopt;
}

// What a group's options are by name, with the present values where none is given.
class NamedValues {
 public:
  explicit NamedValues(const std::vector<std::pair<std::string, double>>& values)
      : values_(values.begin(), values.end()) {}
  double get(const char* name, double otherwise) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  bool get_bool(const char* name, bool otherwise) const {
    return get(name, otherwise ? 1.0 : 0.0) != 0.0;
  }

 private:
  std::map<std::string, double> values_;
};

template <typename Options>
void set_adam(Options& o, const NamedValues& v) {
  o.betas({v.get("beta1", std::get<0>(o.betas())), v.get("beta2", std::get<1>(o.betas()))});
  o.lr(v.get("lr", o.lr())).eps(v.get("eps", o.eps()));
  o.weight_decay(v.get("weight_decay", o.weight_decay()));
  o.amsgrad(v.get_bool("amsgrad", o.amsgrad()));
}

}  // namespace

bool is_known(const torch::optim::Optimizer& optimizer) {
  const std::string name = optimizer_name(optimizer);
  return name == "AdamW" || name == "Adam" || name == "SGD" || name == "RMSprop" ||
         name == "Adagrad";
}

std::optional<InnerState> read_inner_state(const torch::optim::Optimizer& optimizer,
                                           const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end() || !found->second) return std::nullopt;
  if (!is_known(optimizer)) {
    return read_archived_state(optimizer_name(optimizer), *found->second, parameter);
  }
  InnerState state;
  if (const auto step = step_of(*found->second)) {
    state.values.emplace_back("step", at::full({1}, *step, at::TensorOptions().dtype(at::kLong)));
  }
  visit_state_tensors(*found->second, [&](const char* name, const at::Tensor& tensor) {
    state.tensors.emplace_back(name, tensor);
  });
  return state;
}

std::unique_ptr<torch::optim::OptimizerParamState> make_inner_state(
    torch::optim::Optimizer& optimizer, int64_t group, const at::Tensor& parameter,
    const InnerState& state) {
  if (!is_known(optimizer)) return make_archived_state(optimizer, group, parameter, state);
  const std::string name = optimizer_name(optimizer);
  for (const auto& [kind, tensor] : state.tensors) {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "state ", kind, " of ", name,
                ": expected Float, got ", tensor.scalar_type());
  }
  int64_t step = 0;
  for (const auto& [kind, tensor] : state.values) {
    TORCH_CHECK(kind == "step" && tensor.scalar_type() == at::kLong, "state of ", name,
                ": expected step, of Long, as its only value, got ", kind, " of ",
                tensor.scalar_type());
    step = tensor.item<int64_t>();
  }
  NamedTensors tensors(state);
  auto made = make_state(name, tensors, step);
  tensors.check_empty(name);
  return made;
}

std::vector<std::pair<std::string, double>> stored_option_values(
    const torch::optim::OptimizerOptions& options) {
  auto values = option_values(options);
  return values.empty() ? archived_options(options) : values;
}

void set_option_values(torch::optim::OptimizerOptions& options,
                       const std::vector<std::pair<std::string, double>>& values) {
  using namespace torch::optim;
  if (option_values(options).empty()) set_archived_options(options, values);
  const NamedValues v(values);
  if (auto* o = dynamic_cast<AdamWOptions*>(&options)) set_adam(*o, v);
  if (auto* o = dynamic_cast<AdamOptions*>(&options)) set_adam(*o, v);
  if (auto* o = dynamic_cast<SGDOptions*>(&options)) {
    o->lr(v.get("lr", o->lr())).momentum(v.get("momentum", o->momentum()));
    o->dampening(v.get("dampening", o->dampening()));
    o->weight_decay(v.get("weight_decay", o->weight_decay()));
    o->nesterov(v.get_bool("nesterov", o->nesterov()));
  }
  if (auto* o = dynamic_cast<RMSpropOptions*>(&options)) {
    o->lr(v.get("lr", o->lr())).alpha(v.get("alpha", o->alpha())).eps(v.get("eps", o->eps()));
    o->weight_decay(v.get("weight_decay", o->weight_decay()));
    o->momentum(v.get("momentum", o->momentum()));
    o->centered(v.get_bool("centered", o->centered()));
  }
  if (auto* o = dynamic_cast<AdagradOptions*>(&options)) {
    o->lr(v.get("lr", o->lr())).lr_decay(v.get("lr_decay", o->lr_decay()));
    o->weight_decay(v.get("weight_decay", o->weight_decay()));
    o->initial_accumulator_value(
        v.get("initial_accumulator_value", o->initial_accumulator_value()));
    o->eps(v.get("eps", o->eps()));
  }
}

}  // namespace zero
