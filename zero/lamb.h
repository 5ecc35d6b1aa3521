// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// LAMB: a torch::optim::Optimizer like AdamW that scales the update of each parameter by the norm
// of the parameter, for very large batches.
//
//   zero::Lamb lamb(model->parameters(), zero::LambOptions(2e-3).weight_decay(0.01));
//
// It works by itself and in a ZeroOptimizer, where each parameter has one owner that updates it as
// a whole; under tensor parallelism the part that a rank holds is such a parameter.
// For a parameter p with gradient g, in its step t:
//
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + (1 - beta2) * g^2
//   u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
//   p = p - lr * trust * u,   trust = phi(|p|) / |u|
//
// |x| is the Euclidean norm, made in fp32 at least. trust is 1 where phi(|p|) or |u| is 0: a
// parameter that begins as zeros would else never move.
//
// Source: Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
// ICLR 2020 (arXiv 1904.00962), algorithm 2. phi limits the norm to norm_bounds, as in section 3.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace zero {

// The options of Lamb, which each group may have for itself.
struct LambOptions : public torch::optim::OptimizerCloneableOptions<LambOptions> {
  using betas_t = std::tuple<double, double>;
  using norm_bounds_t = std::tuple<double, double>;

  LambOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;                             // the learning rate
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  // beta1 and beta2
  TORCH_ARG(double, eps) = 1e-6;                            // added to the root of v
  TORCH_ARG(double, weight_decay) = 0;                      // a part of u, so scaled by trust
  // False leaves out the divisions by 1 - beta^t.
  TORCH_ARG(bool, bias_correction) = true;
  // phi(x) = min(max(x, first), second). Default: phi(x) = x.
  TORCH_ARG(std::optional<norm_bounds_t>, norm_bounds) = std::nullopt;
  // False makes trust 1, which is usual for a group of biases and norms.
  TORCH_ARG(bool, adapt) = true;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  friend bool operator==(const LambOptions& lhs, const LambOptions& rhs);
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

// The state of Lamb for one parameter.
struct LambParamState : public torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;       // t
  TORCH_ARG(at::Tensor, exp_avg);     // m, like the parameter
  TORCH_ARG(at::Tensor, exp_avg_sq);  // v, like the parameter

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// LAMB: Adam with a trust ratio for each parameter.
class Lamb : public torch::optim::Optimizer {
 public:
  // Throw c10::Error for options that cannot train, in any group.
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                LambOptions defaults = {});
  explicit Lamb(std::vector<at::Tensor> params, LambOptions defaults = {});

  // Leaves out parameters without a gradient. On a GPU the host does not wait for the norms. Throws
  // c10::Error for sparse gradients.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace zero
