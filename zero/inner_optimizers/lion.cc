// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero::Lion itself and its adapter.
#include "zero/lion.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>

#include <memory>
#include <utility>

#include "kernels/lion.h"
#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/own_class.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

void LionOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
}

void LionOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
}

bool operator==(const LionOptions& lhs, const LionOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.betas() == rhs.betas() &&
         lhs.weight_decay() == rhs.weight_decay();
}

void LionParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
}

void LionParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
}

namespace {

void check_options(const LionOptions& o) {
  const auto [beta1, beta2] = o.betas();
  TORCH_CHECK(o.lr() >= 0, "Lion: expected a learning rate of 0 or more, got ", o.lr());
  TORCH_CHECK(0 <= beta1 && beta1 < 1 && 0 <= beta2 && beta2 < 1,
              "Lion: expected betas from 0 to less than 1, got ", beta1, " and ", beta2);
  TORCH_CHECK(o.weight_decay() >= 0, "Lion: expected a weight decay of 0 or more, got ",
              o.weight_decay());
}

}  // namespace

Lion::Lion(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LionOptions defaults)
    : Optimizer(param_groups, std::make_unique<LionOptions>(defaults)) {
  check_options(defaults);
  take_options(param_groups_, param_groups, check_options);
}

Lion::Lion(std::vector<at::Tensor> params, LionOptions defaults)
    : Lion({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

// Each product and each sum is rounded by itself, as in the fused kernel, which has the same bits
// in fp32: an average that is 0 in one and not in the other would move the element by lr.
at::Tensor Lion::step(LossClosure closure) {
  return step_each<LionOptions>(
      closure, "Lion", param_groups_,
      [&](at::Tensor& p, const at::Tensor& gradient, const LionOptions& o) {
        const auto [beta1, beta2] = o.betas();
        auto& state = state_in<LionParamState>(state_[p.unsafeGetTensorImpl()], [&](auto& made) {
          made.exp_avg(at::zeros_like(p, at::MemoryFormat::Preserve));
        });
        at::Tensor& average = state.exp_avg();
        exact_scale(p, 1.0 - o.lr() * o.weight_decay());
        p.add_((average * beta1).add_(gradient * (1.0 - beta1)).sign_().mul_(-o.lr()));
        exact_scale(average, beta2);
        average.add_(gradient * (1.0 - beta2));
      });
}

void Lion::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}

void Lion::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LionParamState, LionOptions>(archive, *this);
}

namespace {

class LionAdapter : public ClassAdapter<Lion, LionOptions, LionParamState>, public FusedUpdate {
 public:
  LionAdapter()
      : ClassAdapter(
            "zero::Lion",
            {ZERO_OPTION(LionOptions, lr), ZERO_ELEMENT(LionOptions, "beta1", betas, 0),
             ZERO_ELEMENT(LionOptions, "beta2", betas, 1), ZERO_OPTION(LionOptions, weight_decay)},
            {ZERO_STATE(LionParamState, exp_avg, kAverage, kAlways)}) {}

  void check_options(const Options& options) const override {
    zero::check_options(static_cast<const LionOptions&>(options));
  }
  const FusedUpdate* fused() const override { return this; }

  bool prepare_state(Optimizer& optimizer, int64_t, const at::Tensor& master,
                     Moments moments) const override {
    LionParamState& state = state_of(optimizer, master);
    const bool made = !state.exp_avg().defined();
    if (made) state.exp_avg(zero_state(master, moments));
    return made;
  }

  void update(Optimizer& optimizer, int64_t group, const std::vector<FusedSegment>& segments,
              const FusedScalars& scalars, c10::ScalarType working_dtype,
              kernels::Stream stream) const override {
    const LionOptions& options = options_of(optimizer, group);
    std::vector<kernels::LionSegment> list;
    list.reserve(segments.size());
    for (const FusedSegment& s : segments) {
      prepare_state(optimizer, group, *s.master, s.moments);
      const at::Tensor& average = state_of(optimizer, *s.master).exp_avg();
      auto segment = kernel_segment<kernels::LionSegment>(s);
      segment.exp_avg = average.mutable_data_ptr();
      segment.state_type = state_type(average);
      list.push_back(segment);
    }
    auto o = kernel_options<kernels::LionOptions>(scalars);
    o.lr = options.lr();
    o.beta1 = std::get<0>(options.betas());
    o.beta2 = std::get<1>(options.betas());
    o.weight_decay = options.weight_decay();
    kernels::lion_step(list, o, scalars.coefficient, scalars.nonfinite, working_dtype, stream);
  }

  int64_t update_count(const Optimizer& optimizer, const at::Tensor& master) const override {
    return find_state(optimizer, master) == nullptr ? 0 : 1;
  }
};

}  // namespace

const OptimizerAdapter& lion_adapter() {
  static const LionAdapter adapter;
  return adapter;
}

}  // namespace zero
