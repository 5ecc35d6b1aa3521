// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Lion: a torch::optim::Optimizer like AdamW with one state tensor in place of two.
//
//   zero::ZeroOptimizer optimizer(
//       *model, std::make_unique<zero::Lion>(model->parameters(), zero::LionOptions(1e-4)), group);
//
// It also works by itself, without a ZeroOptimizer. For each element:
//
//   p = p * (1 - lr * weight_decay)
//   p = p - lr * sign(beta1 * m + (1 - beta1) * g)
//   m = beta2 * m + (1 - beta2) * g
//
// Source: X. Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm
// 2. An element moves by lr whatever the size of its gradient: the authors use a learning rate 3 to
// 10 times smaller, and a weight decay 3 to 10 times larger, than with AdamW.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <tuple>
#include <vector>

namespace zero {

// The options of Lion, which each group may have for itself.
struct LionOptions : public torch::optim::OptimizerCloneableOptions<LionOptions> {
  LionOptions(double lr = 1e-4) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-4;  // the learning rate, by which each element moves
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);  // beta1 and beta2
  TORCH_ARG(double, weight_decay) = 0;                     // multiplied by lr

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  friend bool operator==(const LionOptions& lhs, const LionOptions& rhs);
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

// The state of Lion for one parameter.
struct LionParamState : public torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(at::Tensor, exp_avg);  // m

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Lion: the sign of a momentum, one state for each element.
class Lion : public torch::optim::Optimizer {
 public:
  // Throw c10::Error for a learning rate or weight decay below 0 and betas outside of [0, 1), in
  // any group.
  explicit Lion(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                LionOptions defaults = {});
  explicit Lion(std::vector<at::Tensor> params, LionOptions defaults = {});

  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace zero
