// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The adapter that Adam and AdamW share: torch gives each its own options and state, with the same
// members.
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <vector>

#include "kernels/adam.h"
#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

template <typename Class, typename Options, typename State>
class AdamAdapter : public ClassAdapter<Class, Options, State>, public FusedUpdate {
  using Base = ClassAdapter<Class, Options, State>;
  using Optimizer = torch::optim::Optimizer;

 public:
  // `decoupled`: the weight decay multiplies the parameter, and is no part of the gradient.
  AdamAdapter(const char* name, bool decoupled)
      : Base(name,
             {ZERO_OPTION(Options, lr), ZERO_ELEMENT(Options, "beta1", betas, 0),
              ZERO_ELEMENT(Options, "beta2", betas, 1), ZERO_OPTION(Options, eps),
              ZERO_OPTION(Options, weight_decay), ZERO_OPTION(Options, amsgrad)},
             {ZERO_STATE(State, exp_avg, kAverage, kAlways),
              ZERO_STATE(State, exp_avg_sq, kSecondMoment, kAlways),
              ZERO_STATE(State, max_exp_avg_sq, kPlain, kWithSomeOptions)}),
        decoupled_(decoupled) {}

  std::vector<std::string> optional_state(
      const torch::optim::OptimizerOptions& options) const override {
    if (!static_cast<const Options&>(options).amsgrad()) return {};
    return {"max_exp_avg_sq"};
  }

  const FusedUpdate* fused() const override { return this; }

  bool prepare_state(Optimizer& optimizer, int64_t group, const at::Tensor& master,
                     Moments moments) const override {
    const bool amsgrad = Base::options_of(optimizer, group).amsgrad();
    return prepare(Base::state_of(optimizer, master), amsgrad, master, moments);
  }

  void update(Optimizer& optimizer, int64_t group, const std::vector<FusedSegment>& segments,
              const FusedScalars& scalars, c10::ScalarType working_dtype,
              kernels::Stream stream) const override {
    const Options& options = Base::options_of(optimizer, group);
    std::vector<kernels::AdamSegment> list;
    list.reserve(segments.size());
    for (const FusedSegment& s : segments) {
      State& state = Base::state_of(optimizer, *s.master);
      prepare(state, options.amsgrad(), *s.master, s.moments);
      if (s.count == nullptr) state.step(state.step() + 1);
      auto segment = kernel_segment<kernels::AdamSegment>(s);
      segment.exp_avg = state.exp_avg().mutable_data_ptr();
      segment.exp_avg_sq = state.exp_avg_sq().mutable_data_ptr();
      segment.state_type = state_type(state.exp_avg());
      if (options.amsgrad()) {
        segment.max_exp_avg_sq = state.max_exp_avg_sq().template mutable_data_ptr<float>();
      }
      segment.step = state.step();
      segment.device_step = s.count;
      list.push_back(segment);
    }
    auto o = kernel_options<kernels::AdamOptions>(scalars);
    o.lr = options.lr();
    o.beta1 = std::get<0>(options.betas());
    o.beta2 = std::get<1>(options.betas());
    o.eps = options.eps();
    o.weight_decay = options.weight_decay();
    o.amsgrad = options.amsgrad();
    o.decoupled = decoupled_;
    kernels::adam_step(list, o, scalars.coefficient, scalars.nonfinite, working_dtype, stream);
  }

  int64_t update_count(const Optimizer& optimizer, const at::Tensor& master) const override {
    const State* state = Base::find_state(optimizer, master);
    return state == nullptr ? 0 : state->step();
  }
  void set_update_count(Optimizer& optimizer, const at::Tensor& master,
                        int64_t count) const override {
    State* state = Base::find_state(optimizer, master);
    if (state != nullptr) state->step(count);
  }

 private:
  // Makes the tensors that are missing. True if there were none.
  static bool prepare(State& state, bool amsgrad, const at::Tensor& master, Moments moments) {
    const bool made = !state.exp_avg().defined();
    if (made) {
      state.step(0);
      state.exp_avg(zero_state(master, moments));
      state.exp_avg_sq(zero_state(master, moments));
    }
    if (amsgrad && !state.max_exp_avg_sq().defined()) {
      // In fp32: the largest of values that were rounded at random would only grow.
      state.max_exp_avg_sq(zero_state(master, Moments::kFloat32));
    }
    return made;
  }

  const bool decoupled_;
};

}  // namespace

const OptimizerAdapter& adam_adapter() {
  using namespace torch::optim;
  static const AdamAdapter<Adam, AdamOptions, AdamParamState> adapter("Adam", false);
  return adapter;
}

const OptimizerAdapter& adamw_adapter() {
  using namespace torch::optim;
  static const AdamAdapter<AdamW, AdamWOptions, AdamWParamState> adapter("AdamW", true);
  return adapter;
}

}  // namespace zero
