// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner/classes.h"

#include <ATen/ops/full_like.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <charconv>
#include <typeinfo>

#include "zero/inner/serialized_state.h"

namespace zero {
namespace {

template <typename Class>
bool is_exactly(const torch::optim::Optimizer& optimizer) {
  return typeid(optimizer) == typeid(Class);
}

// Whether both are `Options`; if so, `equal` is their comparison.
template <typename Options>
bool compare(const torch::optim::OptimizerOptions& a, const torch::optim::OptimizerOptions& b,
             bool& equal) {
  const auto* left = dynamic_cast<const Options*>(&a);
  const auto* right = dynamic_cast<const Options*>(&b);
  if (left == nullptr || right == nullptr) return false;
  equal = *left == *right;
  return true;
}

}  // namespace

std::string optimizer_name(const torch::optim::Optimizer& optimizer) {
  if (is_exactly<torch::optim::AdamW>(optimizer)) return "AdamW";
  if (is_exactly<torch::optim::Adam>(optimizer)) return "Adam";
  if (is_exactly<torch::optim::SGD>(optimizer)) return "SGD";
  if (is_exactly<torch::optim::RMSprop>(optimizer)) return "RMSprop";
  if (is_exactly<torch::optim::Adagrad>(optimizer)) return "Adagrad";
  return c10::demangle(typeid(optimizer).name());
}

void check_inner_optimizer(const torch::optim::Optimizer& optimizer, bool elementwise) {
  TORCH_CHECK(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
              "inner optimizer: expected one that treats every element by itself, got LBFGS, which "
              "needs dot products over all parameters and a closure per iteration; on flat "
              "shards it would compute something else. Use AdamW, Adam, SGD, RMSprop or Adagrad");
  const std::string name = optimizer_name(optimizer);
  const bool known =
      name == "AdamW" || name == "Adam" || name == "SGD" || name == "RMSprop" || name == "Adagrad";
  TORCH_CHECK(known || elementwise,
              "inner optimizer: expected AdamW, Adam, SGD, RMSprop or "
              "Adagrad of torch::optim, got ",
              name,
              ". An optimizer that looks at the shape or the norm of a parameter (LAMB, Muon, "
              "Adafactor) would compute something else on flat shards; if this one treats "
              "every element by itself, say so with ZeroOptions().elementwise(true)");
  for (const auto& item : optimizer.state()) {
    const auto* adagrad = dynamic_cast<const torch::optim::AdagradParamState*>(item.second.get());
    TORCH_CHECK(adagrad != nullptr && adagrad->step() == 0,
                "inner optimizer: expected no state yet, got ", optimizer.state().size(),
                " entries: it has stepped or was loaded. Make a new one; to continue a run, use "
                "load_checkpoint()");
  }
}

void make_initial_state(torch::optim::Optimizer& optimizer, int64_t group,
                        const at::Tensor& segment) {
  if (!is_exactly<torch::optim::Adagrad>(optimizer)) return;
  const auto& options =
      static_cast<const torch::optim::AdagradOptions&>(optimizer.param_groups()[group].options());
  auto state = std::make_unique<torch::optim::AdagradParamState>();
  state->step(0);
  state->sum(at::full_like(segment, options.initial_accumulator_value()));
  optimizer.state()[segment.unsafeGetTensorImpl()] = std::move(state);
}

bool equal_options(const torch::optim::OptimizerOptions& a,
                   const torch::optim::OptimizerOptions& b) {
  bool equal = true;
  compare<torch::optim::AdamWOptions>(a, b, equal) ||
      compare<torch::optim::AdamOptions>(a, b, equal) ||
      compare<torch::optim::SGDOptions>(a, b, equal) ||
      compare<torch::optim::RMSpropOptions>(a, b, equal) ||
      compare<torch::optim::AdagradOptions>(a, b, equal);
  return equal;
}

std::vector<std::pair<std::string, double>> option_values(
    const torch::optim::OptimizerOptions& options) {
  const auto adam = [](const auto& o) {
    return std::vector<std::pair<std::string, double>>{
        {"lr", o.lr()},   {"beta1", std::get<0>(o.betas())},  {"beta2", std::get<1>(o.betas())},
        {"eps", o.eps()}, {"weight_decay", o.weight_decay()}, {"amsgrad", o.amsgrad() ? 1.0 : 0.0}};
  };
  if (const auto* o = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) return adam(*o);
  if (const auto* o = dynamic_cast<const torch::optim::AdamOptions*>(&options)) return adam(*o);
  if (const auto* o = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return {{"lr", o->lr()},
            {"momentum", o->momentum()},
            {"dampening", o->dampening()},
            {"weight_decay", o->weight_decay()},
            {"nesterov", o->nesterov() ? 1.0 : 0.0}};
  }
  if (const auto* o = dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) {
    return {{"lr", o->lr()},
            {"alpha", o->alpha()},
            {"eps", o->eps()},
            {"weight_decay", o->weight_decay()},
            {"momentum", o->momentum()},
            {"centered", o->centered() ? 1.0 : 0.0}};
  }
  if (const auto* o = dynamic_cast<const torch::optim::AdagradOptions*>(&options)) {
    return {{"lr", o->lr()},
            {"lr_decay", o->lr_decay()},
            {"weight_decay", o->weight_decay()},
            {"initial_accumulator_value", o->initial_accumulator_value()},
            {"eps", o->eps()}};
  }
  return {};
}

std::string exact_text(double value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof(digits), value).ptr};
}

std::string options_text(const torch::optim::OptimizerOptions& options) {
  std::string text;
  for (const auto& [name, value] : option_values(options)) {
    text += (text.empty() ? "" : " ") + name + " " + exact_text(value);
  }
  return text;
}

void visit_state_tensors(const torch::optim::OptimizerParamState& state,
                         const std::function<void(const char* name, const at::Tensor&)>& visit) {
  const auto give = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) visit(name, tensor);
  };
  const auto adam = [&](const auto& s) {
    give("exp_avg", s.exp_avg());
    give("exp_avg_sq", s.exp_avg_sq());
    give("max_exp_avg_sq", s.max_exp_avg_sq());
  };
  if (const auto* s = dynamic_cast<const torch::optim::AdamWParamState*>(&state)) {
    adam(*s);
  } else if (const auto* s = dynamic_cast<const torch::optim::AdamParamState*>(&state)) {
    adam(*s);
  } else if (const auto* s = dynamic_cast<const torch::optim::SGDParamState*>(&state)) {
    give("momentum_buffer", s->momentum_buffer());
  } else if (const auto* s = dynamic_cast<const torch::optim::RMSpropParamState*>(&state)) {
    give("square_avg", s->square_avg());
    give("momentum_buffer", s->momentum_buffer());
    give("grad_avg", s->grad_avg());
  } else if (const auto* s = dynamic_cast<const torch::optim::AdagradParamState*>(&state)) {
    give("sum", s->sum());
  } else {
    visit_archived_tensors(state, visit);
  }
}

}  // namespace zero
