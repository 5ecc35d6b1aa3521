// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// An optimizer as a user writes one: a class of its own that treats every element
// by itself, with options and a state for which there is no adapter: the update of Lion
// (Chen et al. 2023) and a few values more, each of which the next step depends on.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace zero {

struct OwnOptions : torch::optim::OptimizerCloneableOptions<OwnOptions> {
  explicit OwnOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);
  using Betas = std::tuple<double, double>;
  TORCH_ARG(Betas, betas) = std::make_tuple(0.9, 0.99);
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(int64_t, warmup) = 3;
  TORCH_ARG(bool, decays) = true;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr(); }
  void set_lr(double lr) override { lr_ = lr; }
};

struct OwnState : torch::optim::OptimizerCloneableParamState<OwnState> {
  TORCH_ARG(at::Tensor, momentum);
  TORCH_ARG(at::Tensor, sign);   // of the last update, int16, which NCCL does not know
  TORCH_ARG(at::Tensor, power);  // 0-dim
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(double, product) = 1;
  TORCH_ARG(bool, moved) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

class OwnOptimizer : public torch::optim::Optimizer {
 public:
  OwnOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups, OwnOptions defaults);
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace zero
