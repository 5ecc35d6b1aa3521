// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/fused_update.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

#include "kernels/adam.h"
#include "kernels/sgd.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

using torch::optim::Optimizer;

// The classes that Adam and AdamW each have of their own, with the same members.
struct Adam {
  using Options = torch::optim::AdamOptions;
  using State = torch::optim::AdamParamState;
  static constexpr bool kDecoupled = false;
};
struct AdamW {
  using Options = torch::optim::AdamWOptions;
  using State = torch::optim::AdamWParamState;
  static constexpr bool kDecoupled = true;
};

// Calls function(Adam()) or function(AdamW()), or with any other class, SGD, otherwise().
template <typename Function, typename Otherwise>
auto with_class(const Optimizer& optimizer, Function function, Otherwise otherwise) {
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(torch::optim::AdamW)) return function(AdamW());
  if (type == typeid(torch::optim::Adam)) return function(Adam());
  return otherwise();
}

template <typename State>
State* find_state(const Optimizer& optimizer, const at::Tensor& master) {
  const auto& all = optimizer.state();
  const auto found = all.find(master.unsafeGetTensorImpl());
  return found == all.end() ? nullptr : static_cast<State*>(found->second.get());
}

template <typename State>
State& state_of(Optimizer& optimizer, const at::Tensor& master) {
  auto& slot = optimizer.state()[master.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<State>();
  return static_cast<State&>(*slot);
}

// The state of a segment and whether it was made just now.
template <typename State>
struct MadeState {
  State* state;
  bool made;
};

template <typename Class>
MadeState<typename Class::State> make_adam_state(Optimizer& optimizer, int64_t group,
                                                 const at::Tensor& master) {
  const auto& options =
      static_cast<const typename Class::Options&>(optimizer.param_groups()[group].options());
  auto& state = state_of<typename Class::State>(optimizer, master);
  const bool made = !state.exp_avg().defined();
  if (made) {
    state.step(0);
    state.exp_avg(at::zeros_like(master));
    state.exp_avg_sq(at::zeros_like(master));
  }
  if (options.amsgrad() && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(at::zeros_like(master));
  }
  return {&state, made};
}

// Without momentum there is none.
MadeState<torch::optim::SGDParamState> make_sgd_state(Optimizer& optimizer, int64_t group,
                                                      const at::Tensor& master) {
  const auto& options =
      static_cast<const torch::optim::SGDOptions&>(optimizer.param_groups()[group].options());
  if (options.momentum() == 0) return {nullptr, false};
  auto& state = state_of<torch::optim::SGDParamState>(optimizer, master);
  const bool made = !state.momentum_buffer().defined();
  if (made) state.momentum_buffer(at::empty_like(master));
  return {&state, made};
}

template <typename Class>
void update_adam(Optimizer& optimizer, int64_t group, const std::vector<FusedSegment>& segments,
                 const FusedScalars& scalars, c10::ScalarType working_dtype) {
  const auto& options =
      static_cast<const typename Class::Options&>(optimizer.param_groups()[group].options());
  std::vector<kernels::AdamSegment> list;
  list.reserve(segments.size());
  for (const FusedSegment& s : segments) {
    auto& state = *make_adam_state<Class>(optimizer, group, *s.master).state;
    if (s.count == nullptr) state.step(state.step() + 1);
    kernels::AdamSegment segment;
    segment.master = s.master->template mutable_data_ptr<float>();
    segment.exp_avg = state.exp_avg().template mutable_data_ptr<float>();
    segment.exp_avg_sq = state.exp_avg_sq().template mutable_data_ptr<float>();
    if (options.amsgrad()) {
      segment.max_exp_avg_sq = state.max_exp_avg_sq().template mutable_data_ptr<float>();
    }
    segment.gradient = s.gradient;
    segment.working = s.working;
    segment.numel = s.master->numel();
    segment.step = state.step();
    segment.device_step = s.count;
    list.push_back(segment);
  }
  kernels::AdamOptions o;
  o.lr = options.lr();
  o.beta1 = std::get<0>(options.betas());
  o.beta2 = std::get<1>(options.betas());
  o.eps = options.eps();
  o.weight_decay = options.weight_decay();
  o.amsgrad = options.amsgrad();
  o.decoupled = Class::kDecoupled;
  kernels::adam_step(list, o, scalars.coefficient, scalars.nonfinite, working_dtype,
                     current_stream(segments.front().master->device()));
}

void update_sgd(Optimizer& optimizer, int64_t group, const std::vector<FusedSegment>& segments,
                const FusedScalars& scalars, c10::ScalarType working_dtype) {
  const auto& options =
      static_cast<const torch::optim::SGDOptions&>(optimizer.param_groups()[group].options());
  std::vector<kernels::SgdSegment> list;
  list.reserve(segments.size());
  for (const FusedSegment& s : segments) {
    kernels::SgdSegment segment;
    const auto [state, made] = make_sgd_state(optimizer, group, *s.master);
    segment.first_step = made;
    if (state != nullptr) segment.momentum = state->momentum_buffer().mutable_data_ptr<float>();
    segment.master = s.master->mutable_data_ptr<float>();
    segment.gradient = s.gradient;
    segment.working = s.working;
    segment.numel = s.master->numel();
    segment.device_step = s.count;
    list.push_back(segment);
  }
  kernels::SgdOptions o;
  o.lr = options.lr();
  o.momentum = options.momentum();
  o.dampening = options.dampening();
  o.weight_decay = options.weight_decay();
  o.nesterov = options.nesterov();
  kernels::sgd_step(list, o, scalars.coefficient, scalars.nonfinite, working_dtype,
                    current_stream(segments.front().master->device()));
}

}  // namespace

bool has_fused_update(const Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  return type == typeid(torch::optim::AdamW) || type == typeid(torch::optim::Adam) ||
         type == typeid(torch::optim::SGD);
}

bool make_fused_state(Optimizer& optimizer, int64_t group, const at::Tensor& master) {
  return with_class(
      optimizer,
      [&](auto c) { return make_adam_state<decltype(c)>(optimizer, group, master).made; },
      [&] { return make_sgd_state(optimizer, group, master).made; });
}

void fused_update(Optimizer& optimizer, int64_t group, const std::vector<FusedSegment>& segments,
                  const FusedScalars& scalars, c10::ScalarType working_dtype) {
  if (segments.empty()) return;
  with_class(
      optimizer,
      [&](auto c) { update_adam<decltype(c)>(optimizer, group, segments, scalars, working_dtype); },
      [&] { update_sgd(optimizer, group, segments, scalars, working_dtype); });
}

int64_t update_count(const Optimizer& optimizer, const at::Tensor& master) {
  return with_class(
      optimizer,
      [&](auto c) {
        const auto* state = find_state<typename decltype(c)::State>(optimizer, master);
        return state == nullptr ? int64_t{0} : state->step();
      },
      [&] {
        const auto* state = find_state<torch::optim::SGDParamState>(optimizer, master);
        return int64_t{state != nullptr && state->momentum_buffer().defined() ? 1 : 0};
      });
}

void set_update_count(Optimizer& optimizer, const at::Tensor& master, int64_t count) {
  if (count == 0) {
    optimizer.state().erase(master.unsafeGetTensorImpl());
    return;
  }
  with_class(
      optimizer,
      [&](auto c) {
        auto* state = find_state<typename decltype(c)::State>(optimizer, master);
        if (state != nullptr) state->step(count);
      },
      [] {});
}

}  // namespace zero
