// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/own_optimizer.h"

#include <ATen/Functions.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <memory>

namespace zero {

void OwnOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(warmup);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(decays);
}

void OwnOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(Betas, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, warmup);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, decays);
}

void OwnState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(sign);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(power);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(product);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(moved);
}

void OwnState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, sign);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, power);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, product);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, moved);
}

OwnOptimizer::OwnOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                           OwnOptions defaults)
    : Optimizer(groups, std::make_unique<OwnOptions>(defaults)) {}

at::Tensor OwnOptimizer::step(LossClosure) {
  at::NoGradGuard no_grad;
  for (auto& group : param_groups_) {
    const auto& o = static_cast<const OwnOptions&>(group.options());
    const auto [beta1, beta2] = o.betas();
    for (at::Tensor& p : group.params()) {
      if (!p.grad().defined()) continue;
      auto& slot = state_[p.unsafeGetTensorImpl()];
      if (!slot) {
        auto fresh = std::make_unique<OwnState>();
        fresh->momentum(at::zeros_like(p));
        fresh->sign(at::zeros(p.sizes(), p.options().dtype(at::kShort)));
        fresh->power(at::ones({}, at::TensorOptions().dtype(at::kDouble)));
        slot = std::move(fresh);
      }
      auto& s = static_cast<OwnState&>(*slot);
      s.step(s.step() + 1);
      s.product(s.product() * 0.9);
      s.power().mul_(0.99);
      const at::Tensor update = at::sign(s.momentum() * beta1 + p.grad() * (1 - beta1));
      const double ramp = std::min(1.0, static_cast<double>(s.step()) / (1.0 + o.warmup()));
      const double rate = o.lr() * ramp * (1 - s.product()) * s.power().item<double>();
      if (o.decays() && s.moved()) p.mul_(1 - o.lr() * o.weight_decay());
      p.sub_(update * rate + s.sign().to(p.scalar_type()) * (0.1 * rate));
      s.sign(update.to(at::kShort));
      s.momentum().mul_(beta2).add_(p.grad(), 1 - beta2);
      s.moved(true);
    }
  }
  return {};
}

}  // namespace zero
