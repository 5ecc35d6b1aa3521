// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Adafactor: a torch::optim::Optimizer that keeps sums of squares per row and per column in place
// of one per element, with the options and the numbers of torch.optim.Adafactor of Python.
//
//   zero::Adafactor adafactor(model->parameters(), zero::AdafactorOptions(1e-2));
//
// It works by itself and in a ZeroOptimizer, where each parameter has one owner that updates it as
// a whole; under tensor parallelism the part that a rank holds is such a parameter.
// For a parameter p of shape [..., n, m] with gradient g, in its step t, with k =
// t^beta2_decay:
//
//   alpha = max(eps2, rms(p)) * min(lr, 1 / sqrt(t))
//   p = p * (1 - lr * weight_decay)
//   r = r + k * (mean of g^2 over the last dimension - r)             r: [..., n, 1]
//   c = c + k * (mean of g^2 over the last but one dimension - c)     c: [..., 1, m]
//   v = r * c / max(mean of r over n, eps1)
//   u = g / max(sqrt(v), eps1)
//   p = p - alpha / max(1, rms(u) / d) * u
//
// rms(x) is the root of the mean of x^2. A vector or a scalar has v = v + k * (g^2 - v) in place of
// r and c. With maximize, g is the negative gradient.
//
// Source: N. Shazeer, M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
// ICML 2018 (arXiv 1804.04235), algorithms 4 and 5. As in PyTorch, lr limits the relative step,
// weight decay is multiplied by it, and eps1 limits v and u where the paper adds it to g^2. On a
// CPU, its rms of millions of elements loses small squares, and this one does not.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace zero {

// The options of Adafactor, which each group may have for itself.
struct AdafactorOptions : public torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  using eps_t = std::tuple<std::optional<double>, double>;

  AdafactorOptions(double lr = 1e-2) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-2;           // the learning rate, which limits the relative step
  TORCH_ARG(double, beta2_decay) = -0.8;  // the exponent of t in k
  // eps1 and eps2. eps1 is by default the machine epsilon of the dtype of each parameter. Python
  // 2.11 takes that of a group's first parameter for the whole group.
  TORCH_ARG(eps_t, eps) = eps_t(std::nullopt, 1e-3);
  TORCH_ARG(double, d) = 1.0;           // the bound of rms(u)
  TORCH_ARG(double, weight_decay) = 0;  // multiplied by lr
  TORCH_ARG(bool, maximize) = false;    // steps up the gradient

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  friend bool operator==(const AdafactorOptions& lhs, const AdafactorOptions& rhs);
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

// The state of Adafactor for one parameter.
struct AdafactorParamState
    : public torch::optim::OptimizerCloneableParamState<AdafactorParamState> {
  TORCH_ARG(int64_t, step) = 0;     // t
  TORCH_ARG(at::Tensor, row_var);   // r, undefined for vectors and scalars
  TORCH_ARG(at::Tensor, col_var);   // c, undefined for vectors and scalars
  TORCH_ARG(at::Tensor, variance);  // v of vectors and scalars, else undefined

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Adafactor, which keeps the second moment of a matrix as one row and one column.
class Adafactor : public torch::optim::Optimizer {
 public:
  // Throw c10::Error for options that cannot train, in any group.
  explicit Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     AdafactorOptions defaults = {});
  explicit Adafactor(std::vector<at::Tensor> params, AdafactorOptions defaults = {});

  // Leaves out parameters without a gradient. On a GPU the host waits for two norms of each
  // parameter. Throws c10::Error for sparse gradients.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace zero
