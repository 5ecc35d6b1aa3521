// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The adapter of a class as a list of its options and one of its state tensors.
#pragma once

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <type_traits>
#include <typeinfo>

#include "zero/inner_optimizers/adapter.h"
#include "zero/inner_optimizers/state_store.h"

namespace zero {

// A number or a truth value among a class's options.
template <typename Options>
struct OptionField {
  const char* name;
  double (*get)(const Options& options);
  void (*set)(Options& options, double value);
};

template <typename Options, typename Accessor>
OptionField<Options> option(const char* name, Accessor) {
  return {name, [](const Options& o) { return static_cast<double>(Accessor()(o)); },
          [](Options& o, double value) {
            auto& field = Accessor()(o);
            if constexpr (std::is_same_v<std::decay_t<decltype(field)>, bool>) {
              field = value != 0.0;
            } else {
              field = value;
            }
          }};
}

// A tensor with one value per element.
template <typename State>
struct StateField {
  const char* name;
  const at::Tensor& (*get)(const State& state);
  void (*set)(State& state, at::Tensor tensor);
  StateRole role;
  bool required;  // a state without it is broken
};
enum class Needed { kAlways, kWithSomeOptions };

template <typename State, typename Accessor>
StateField<State> state_tensor(const char* name, Accessor, StateRole role, Needed needed) {
  return {name, [](const State& s) -> const at::Tensor& { return Accessor()(s); },
          [](State& s, at::Tensor tensor) { Accessor()(s) = std::move(tensor); }, role,
          needed == Needed::kAlways};
}

// Each has the name of its accessor, which returns a reference; an element of a tuple has its own.
#define ZERO_OPTION(Options, name) \
  option<Options>(                 \
      #name, [](auto& o) -> auto& { return o.name(); })
#define ZERO_ELEMENT(Options, name, tuple, i) \
  option<Options>(                            \
      name, [](auto& o) -> auto& { return std::get<i>(o.tuple()); })
#define ZERO_STATE(State, name, role, needed) \
  state_tensor<State>(                        \
      #name, [](auto& s) -> auto& { return s.name(); }, StateRole::role, Needed::needed)

template <typename Class, typename ClassOptions, typename ClassState>
class ClassAdapter : public OptimizerAdapter {
 public:
  // Whether the class counts the updates of a parameter.
  static constexpr bool kCounts = requires(const ClassState& state) { state.step(); };

  ClassAdapter(const char* name, std::vector<OptionField<ClassOptions>> options,
               std::vector<StateField<ClassState>> tensors)
      : name_(name), options_(std::move(options)), tensors_(std::move(tensors)) {}

  std::string name() const override { return name_; }
  bool is_class_of(const Optimizer& optimizer) const override {
    return typeid(optimizer) == typeid(Class);
  }
  bool is_class_of(const Options& options) const override {
    return dynamic_cast<const ClassOptions*>(&options) != nullptr;
  }
  bool is_class_of(const State& state) const override {
    return dynamic_cast<const ClassState*>(&state) != nullptr;
  }

  OptionValues option_values(const Options& options) const override {
    const auto& o = static_cast<const ClassOptions&>(options);
    OptionValues values;
    for (const auto& field : options_) values.emplace_back(field.name, field.get(o));
    return values;
  }
  void set_option_values(Options& options, const OptionValues& values) const override {
    auto& o = static_cast<ClassOptions&>(options);
    const std::map<std::string, double> by_name(values.begin(), values.end());
    for (const auto& field : options_) {
      const auto found = by_name.find(field.name);
      if (found != by_name.end()) field.set(o, found->second);
    }
  }
  bool equal_options(const Options& a, const Options& b) const override {
    return !is_class_of(b) ||
           static_cast<const ClassOptions&>(a) == static_cast<const ClassOptions&>(b);
  }

  void visit_tensors(const State& state, const VisitTensor& visit) const override {
    for (const auto& field : tensors_) {
      const at::Tensor& tensor = field.get(static_cast<const ClassState&>(state));
      if (tensor.defined()) visit(field.name, tensor);
    }
  }
  InnerState read_state(const Optimizer&, const State& state,
                        const at::Tensor& parameter) const override {
    TORCH_CHECK(is_class_of(state), "state of ", name_,
                ": expected the class of state that it makes, got another");
    const auto& own = static_cast<const ClassState&>(state);
    InnerState result;
    if constexpr (kCounts) result.values.emplace_back("step", at::full({1}, own.step(), at::kLong));
    for (const auto& field : tensors_) {
      const at::Tensor& tensor = field.get(own);
      if (!tensor.defined()) continue;
      result.tensors.emplace_back(field.name, state_elements(tensor, field.role, parameter));
    }
    return result;
  }
  std::unique_ptr<State> make_state(Optimizer&, int64_t, const at::Tensor& parameter,
                                    const InnerState& content, Moments moments) const override;
  std::vector<std::string> required_state() const override {
    std::vector<std::string> names;
    for (const auto& field : tensors_) {
      if (field.required) names.emplace_back(field.name);
    }
    if (kCounts) names.emplace_back("step");
    return names;
  }
  void complete_state(State& state, const Options& options,
                      const at::Tensor& parameter) const override {
    const std::vector<std::string> names = this->optional_state(options);
    auto& own = static_cast<ClassState&>(state);
    for (const auto& field : tensors_) {
      const bool wanted = std::find(names.begin(), names.end(), field.name) != names.end();
      if (wanted && !field.get(own).defined()) {
        field.set(own, zero_state(parameter, Moments::kFloat32));
      }
    }
  }

 protected:
  static const ClassOptions& options_of(const Optimizer& optimizer, int64_t group) {
    return static_cast<const ClassOptions&>(optimizer.param_groups()[group].options());
  }
  // Null without state.
  static ClassState* find_state(const Optimizer& optimizer, const at::Tensor& master) {
    const auto& all = optimizer.state();
    const auto found = all.find(master.unsafeGetTensorImpl());
    return found == all.end() ? nullptr : static_cast<ClassState*>(found->second.get());
  }
  // Empty state where there is none.
  static ClassState& state_of(Optimizer& optimizer, const at::Tensor& master) {
    auto& slot = optimizer.state()[master.unsafeGetTensorImpl()];
    if (!slot) slot = std::make_unique<ClassState>();
    return static_cast<ClassState&>(*slot);
  }

 private:
  const char* const name_;
  const std::vector<OptionField<ClassOptions>> options_;
  const std::vector<StateField<ClassState>> tensors_;
};

template <typename Class, typename ClassOptions, typename ClassState>
std::unique_ptr<torch::optim::OptimizerParamState>
ClassAdapter<Class, ClassOptions, ClassState>::make_state(Optimizer&, int64_t,
                                                          const at::Tensor& parameter,
                                                          const InnerState& content,
                                                          Moments moments) const {
  TORCH_CHECK(content.uncut.empty(), "state: expected tensors that ", name_, " has, got ",
              content.uncut.front().first);
  for (const auto& [name, tensor] : content.tensors) {
    TORCH_CHECK(tensor.scalar_type() == at::kFloat, "state ", name, " of ", name_,
                ": expected Float, got ", tensor.scalar_type());
  }
  int64_t step = 0;
  for (const auto& [name, value] : content.values) {
    TORCH_CHECK(name == "step" && value.scalar_type() == at::kLong, "state of ", name_,
                ": expected step, of Long, as its only value, got ", name, " of ",
                value.scalar_type());
    step = value.template item<int64_t>();
  }
  std::map<std::string, at::Tensor> given(content.tensors.begin(), content.tensors.end());
  auto made = std::make_unique<ClassState>();
  if constexpr (kCounts) made->step(step);
  for (const auto& field : tensors_) {
    const auto found = given.find(field.name);
    if (found == given.end()) continue;
    const Moments own = field.role == StateRole::kPlain ? Moments::kFloat32 : moments;
    field.set(*made, stored_state(found->second, field.role, own, parameter));
    given.erase(found);
  }
  TORCH_CHECK(given.empty(), "state: expected tensors that ", name_, " has, got ",
              given.begin()->first);
  return made;
}

}  // namespace zero
