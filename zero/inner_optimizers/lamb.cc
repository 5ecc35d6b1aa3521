// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/lamb.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>

#include <cmath>
#include <memory>
#include <utility>

#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/own_class.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

void LambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(bias_correction);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(norm_bounds);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adapt);
}

void LambOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, bias_correction);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG_OPTIONAL(norm_bounds_t, norm_bounds);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, adapt);
}

bool operator==(const LambOptions& lhs, const LambOptions& rhs) {
  return lhs.lr() == rhs.lr() && lhs.betas() == rhs.betas() && lhs.eps() == rhs.eps() &&
         lhs.weight_decay() == rhs.weight_decay() &&
         lhs.bias_correction() == rhs.bias_correction() && lhs.norm_bounds() == rhs.norm_bounds() &&
         lhs.adapt() == rhs.adapt();
}

void LambParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
}

void LambParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq);
}

namespace {

void check_options(const LambOptions& o) {
  const auto [beta1, beta2] = o.betas();
  TORCH_CHECK(o.lr() >= 0, "Lamb: expected a learning rate of 0 or more, got ", o.lr());
  TORCH_CHECK(0 <= beta1 && beta1 < 1 && 0 <= beta2 && beta2 < 1,
              "Lamb: expected betas from 0 to less than 1, got ", beta1, " and ", beta2);
  TORCH_CHECK(o.eps() >= 0, "Lamb: expected an eps of 0 or more, got ", o.eps());
  TORCH_CHECK(o.weight_decay() >= 0, "Lamb: expected a weight decay of 0 or more, got ",
              o.weight_decay());
  if (o.norm_bounds()) {
    const auto [least, most] = *o.norm_bounds();
    TORCH_CHECK(0 <= least && least <= most,
                "Lamb: expected norm_bounds of 0 or more in ascending order, got ", least, " and ",
                most);
  }
}

// In fp32 at least: a 16-bit norm would round the trust ratio to three digits.
at::Tensor norm_of(const at::Tensor& x) {
  return euclidean_norm(x, x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// phi(|p|) / |u| as a tensor, so that the host does not wait for a GPU.
at::Tensor trust(const at::Tensor& p, const at::Tensor& update, const LambOptions& o) {
  at::Tensor of_parameter = norm_of(p);
  if (o.norm_bounds()) {
    of_parameter.clamp_(std::get<0>(*o.norm_bounds()), std::get<1>(*o.norm_bounds()));
  }
  const at::Tensor of_update = norm_of(update);
  return at::where(at::logical_and(of_parameter.ne(0), of_update.ne(0)), of_parameter / of_update,
                   at::Scalar(1.0));
}

void update(at::Tensor& p, const at::Tensor& gradient, LambParamState& state,
            const LambOptions& o) {
  const auto [beta1, beta2] = o.betas();
  state.step(state.step() + 1);
  const auto t = static_cast<double>(state.step());
  exact_scale(state.exp_avg(), beta1);
  exact_scale(state.exp_avg_sq(), beta2);
  state.exp_avg().add_(gradient, 1.0 - beta1);
  state.exp_avg_sq().addcmul_(gradient, gradient, 1.0 - beta2);
  at::Tensor denominator = o.bias_correction()
                               ? (state.exp_avg_sq() / (1.0 - std::pow(beta2, t))).sqrt_()
                               : state.exp_avg_sq().sqrt();
  at::Tensor u = state.exp_avg() / denominator.add_(o.eps());
  if (o.bias_correction()) u.div_(1.0 - std::pow(beta1, t));
  if (o.weight_decay() != 0) u.add_(p, o.weight_decay());
  if (o.adapt()) u.mul_(trust(p, u, o));
  p.add_(u, -o.lr());
}

}  // namespace

Lamb::Lamb(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LambOptions defaults)
    : Optimizer(param_groups, std::make_unique<LambOptions>(defaults)) {
  check_options(defaults);
  take_options(param_groups_, param_groups, check_options);
}

Lamb::Lamb(std::vector<at::Tensor> params, LambOptions defaults)
    : Lamb({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

at::Tensor Lamb::step(LossClosure closure) {
  return step_each<LambOptions>(
      closure, "Lamb", param_groups_,
      [&](at::Tensor& p, const at::Tensor& gradient, const LambOptions& o) {
        auto& state = state_in<LambParamState>(state_[p.unsafeGetTensorImpl()], [&](auto& made) {
          made.exp_avg(at::zeros_like(p, at::MemoryFormat::Preserve));
          made.exp_avg_sq(at::zeros_like(p, at::MemoryFormat::Preserve));
        });
        update(p, gradient, state, o);
      });
}

void Lamb::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}

void Lamb::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LambParamState, LambOptions>(archive, *this);
}

namespace {

// No norm is negative: this stands for no bounds.
constexpr double kNoBound = -1.0;

template <size_t I>
OptionField<LambOptions> norm_bound(const char* name) {
  return {name,
          [](const LambOptions& o) {
            return o.norm_bounds() ? std::get<I>(*o.norm_bounds()) : kNoBound;
          },
          [](LambOptions& o, double value) {
            if (value == kNoBound) {
              o.norm_bounds(std::nullopt);
              return;
            }
            auto bounds = o.norm_bounds().value_or(LambOptions::norm_bounds_t());
            std::get<I>(bounds) = value;
            o.norm_bounds(bounds);
          }};
}

class LambAdapter : public ClassAdapter<Lamb, LambOptions, LambParamState> {
 public:
  LambAdapter()
      : ClassAdapter("zero::Lamb",
                     {ZERO_OPTION(LambOptions, lr), ZERO_ELEMENT(LambOptions, "beta1", betas, 0),
                      ZERO_ELEMENT(LambOptions, "beta2", betas, 1), ZERO_OPTION(LambOptions, eps),
                      ZERO_OPTION(LambOptions, weight_decay),
                      ZERO_OPTION(LambOptions, bias_correction), norm_bound<0>("least_norm"),
                      norm_bound<1>("largest_norm"), ZERO_OPTION(LambOptions, adapt)},
                     {ZERO_STATE(LambParamState, exp_avg, kPlain, kAlways),
                      ZERO_STATE(LambParamState, exp_avg_sq, kPlain, kAlways)}) {}

  bool needs_whole_parameters() const override { return true; }
  void check_options(const Options& options) const override {
    zero::check_options(static_cast<const LambOptions&>(options));
  }
};

}  // namespace

const OptimizerAdapter& lamb_adapter() {
  static const LambAdapter adapter;
  return adapter;
}

}  // namespace zero
