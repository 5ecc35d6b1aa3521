// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner/newton_schulz.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>

#include <algorithm>

namespace zero {
namespace {

bool is_tall(const at::Tensor& matrix) { return matrix.size(0) > matrix.size(1); }

void normalise(at::Tensor& matrix, double eps) {
  matrix.div_(at::linalg_vector_norm(matrix).clamp_min_(eps));
}

}  // namespace

at::Tensor newton_schulz(const at::Tensor& matrix, const NewtonSchulz& o) {
  const auto [a, b, c] = o.coefficients;
  at::Tensor x = matrix.to(o.dtype, /*non_blocking=*/false, /*copy=*/true);
  if (is_tall(matrix)) x = x.t();
  normalise(x, o.eps);
  for (int64_t step = 0; step < o.steps; ++step) {
    const at::Tensor gram = at::matmul(x, x.t());
    const at::Tensor polynomial = at::addmm(gram, gram, gram, b, c);
    x = at::addmm(x, polynomial, x, a);
  }
  return is_tall(matrix) ? x.t() : x;
}

// Measured on one core with AVX-512, 5 steps: in bf16, 64 matrices of 64 x 64 take 1.5 ms in a
// batch and 14.4 ms one by one, and 16 of 256 x 256 take 16.6 and 20.0 ms; in fp32, 64 of 32 x 32
// take 0.8 and 2.4 ms, and 32 of 128 x 128 take 21.8 and 19.2 ms. From 512 on there is no gain.
//
// An owner's number of matrices must change no bit, and torch has several products. In bf16,
// oneDNN's is for 16^3 multiplications or more, those of a whole batch added up. In fp32, MKL cuts
// the product of one large matrix for several threads, and of a batch only if there are fewer
// matrices.
bool is_batched(const at::Tensor& matrix, const NewtonSchulz& o) {
  const auto [side, length] = std::minmax({matrix.size(0), matrix.size(1)});
  if (o.dtype == c10::ScalarType::BFloat16) return side >= 16 && side <= 256;
  return side * side * length <= int64_t{1} << 16;
}

// Each matrix is normalised by itself, since a reduction over a batch adds up in an order that
// depends on the number of matrices.
std::vector<at::Tensor> newton_schulz_batch(const std::vector<at::Tensor>& matrices,
                                            const NewtonSchulz& o) {
  const auto [a, b, c] = o.coefficients;
  const bool tall = is_tall(matrices.front());
  const auto count = static_cast<int64_t>(matrices.size());
  const int64_t rows = matrices.front().size(tall ? 1 : 0);
  const int64_t columns = matrices.front().size(tall ? 0 : 1);
  at::Tensor x = at::empty({count, rows, columns}, matrices.front().options().dtype(o.dtype));
  for (int64_t i = 0; i < count; ++i) {
    at::Tensor matrix = x.select(0, i);
    matrix.copy_(tall ? matrices[i].t() : matrices[i]);
    normalise(matrix, o.eps);
  }
  for (int64_t step = 0; step < o.steps; ++step) {
    const at::Tensor gram = at::bmm(x, x.transpose(1, 2));
    const at::Tensor polynomial = at::baddbmm(gram, gram, gram, b, c);
    x = at::baddbmm(x, polynomial, x, a);
  }
  std::vector<at::Tensor> result;
  result.reserve(matrices.size());
  for (int64_t i = 0; i < count; ++i) {
    result.push_back(tall ? x.select(0, i).t() : x.select(0, i));
  }
  return result;
}

}  // namespace zero
