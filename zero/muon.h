// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Muon: a torch::optim::Optimizer for the matrices of hidden layers, with the options and the
// numbers of torch.optim.Muon of Python.
//
//   zero::Muon muon(matrices, zero::MuonOptions(0.02));
//   torch::optim::AdamW adamw(the_others, 3e-4);  // embeddings, head, norms, biases
//
// CombinedOptimizer makes one optimizer of the two. It works by itself and in a ZeroOptimizer,
// where each matrix has one owner that updates it as a whole; under tensor parallelism the part
// that a rank holds is such a matrix. For each matrix p of shape [m, n] with gradient g:
//
//   b = b + (1 - momentum) * (g - b)  // with moments(): momentum * b + (1 - momentum) * g
//   u = nesterov ? g + momentum * (b - g) : b
//   p = p * (1 - lr * weight_decay)
//   p = p - lr * adjust(m, n) * orthogonal(u)
//
// adjust is sqrt(max(1, m / n)) for "original" and 0.2 * sqrt(max(m, n)) for "match_rms_adamw".
// orthogonal(u) is about the nearest matrix to u with orthonormal rows or columns. It starts with
// x = u / max(|u|, eps), |u| the Frobenius norm, transposed if m > n, and repeats ns_steps times,
// with ns_coefficients (a, b, c) and A = x * x^T:
//
//   x = a * x + (b * A + c * A * A) * x
//
// Large matrices with one side of at least twice the other take two iterations at a time: with
// P = a * I + b * A + c * A * A, the next A is P * (P * A), since both commute, and x is multiplied
// by the product of two P. The rounding errors are not larger than those of the formula, but
// others: in bf16, results for large matrices differ from Python's by about 1.3 % in the Frobenius
// norm, as Python's do from exact arithmetic.
//
// Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, for
// the method, the coefficients and "original"; J. Liu et al., "Muon is Scalable for LLM Training",
// arXiv 2502.16982, 2025, section 2.2, for weight decay and "match_rms_adamw".
//
// A matrix costs at most 2 * ns_steps * s^2 * (2 * l + s) floating-point operations per step, with
// s = min(m, n) and l = max(m, n). With 5 steps, a large matrix costs s^2 * (16.3 * l + 6.3 * s) on
// a CPU, which computes symmetric products from the diagonal on, and s^2 * (9.8 * l + 13.8 * s)
// with two iterations at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace zero {

// True where libtorch multiplies matrices of bfloat16 by instructions of `device`: by what oneDNN
// requires of a processor, on x86 AVX-512, and for every other device. Without them a product of
// 1024 x 1024 takes 70 times as long as in fp32.
bool has_bf16_products(at::Device device);

// Cuts a tensor of a parameter's shape into 2-D views of it, which share its memory, do not overlap
// and together are all of it. Each view is orthogonalised by itself and has its own adjust(m, n).
using MuonSplit = std::function<std::vector<at::Tensor>(const at::Tensor&)>;

// The split into blocks of `sizes` rows: {w, w, w} for a fused QKV of shape [3 * w, w], or heads
// times the size of a head. The split throws c10::Error for another number of rows.
MuonSplit split_rows(std::vector<int64_t> sizes);

// The options of Muon, which each group may have for itself.
struct MuonOptions : public torch::optim::OptimizerCloneableOptions<MuonOptions> {
  using ns_coefficients_t = std::tuple<double, double, double>;

  MuonOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;           // the learning rate, times adjust(m, n)
  TORCH_ARG(double, weight_decay) = 0.1;  // multiplied by lr
  TORCH_ARG(double, momentum) = 0.95;     // the part of b that a step keeps
  TORCH_ARG(bool, nesterov) = true;       // orthogonalises g + momentum * (b - g) in place of b
  // a, b and c of the iteration.
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.7750, 2.0315);
  TORCH_ARG(double, eps) = 1e-7;                      // the least |u| that divides u
  TORCH_ARG(int64_t, ns_steps) = 5;                   // iterations of orthogonal(u)
  TORCH_ARG(std::string, adjust_lr_fn) = "original";  // or "match_rms_adamw"

  // The dtype of orthogonal(u): kBFloat16 as in Python, or kFloat. Without one, it is bfloat16
  // where has_bf16_products() is true, on a CPU for matrices m x n, m <= n, with m m n >= 2^21.
  // Elsewhere the elements of all factors are rounded to bfloat16, and their products are made in
  // fp32, at least as exact as kBFloat16, in 1.0 to 1.15 of the time of kFloat. Processors of both
  // kinds in one job differ in bits, so that the constructor of ZeroOptimizer throws there; a run
  // that goes on on the other kind has other bits. With many equal matrices of sides about 64, an
  // explicit kBFloat16 takes 0.4 of the time of kFloat on a processor that has such products.
  TORCH_ARG(std::optional<c10::ScalarType>, ns_dtype) = std::nullopt;
  // Orthogonalises small matrices of equal shape together, where that is faster: with a smaller
  // side of 17 to 256 in bf16, and in fp32 on a GPU if its square times the larger side is at most
  // 65,536.
  // On a CPU the bits of a matrix do not depend on which others there are. On a GPU, cuBLAS may
  // choose another algorithm for another number of matrices: false keeps the bits the same there
  // too.
  TORCH_ARG(bool, batched) = true;
  // Without one, a parameter is one matrix. With one, a parameter may have any shape. It is not
  // saved, and load() keeps the present one.
  TORCH_ARG(MuonSplit, split) = nullptr;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  // Compares everything but `split`.
  friend bool operator==(const MuonOptions& lhs, const MuonOptions& rhs);
  double get_lr() const override { return lr(); }
  void set_lr(const double lr) override { this->lr(lr); }
};

// The state of Muon for one parameter.
struct MuonParamState : public torch::optim::OptimizerCloneableParamState<MuonParamState> {
  // b, like the gradient; or, in a ZeroOptimizer, in the format of ZeroOptions::moments.
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

// Muon: the momentum of a matrix, made orthogonal.
class Muon : public torch::optim::Optimizer {
 public:
  // Throw c10::Error for options that cannot train, in any group, for a parameter that is not a
  // matrix in a group without a split, and for one that its split does not cover.
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                MuonOptions defaults = {});
  explicit Muon(std::vector<at::Tensor> params, MuonOptions defaults = {});

  // Leaves out parameters without a gradient. Throws c10::Error for sparse gradients, for options
  // that the constructor refuses and for a split that does not cover a parameter. With 16-bit
  // parameters and without nesterov, Python 2.11 overwrites b with the normalised u; here b keeps
  // its value.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace zero
