// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/inner_optimizers/newton_schulz.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "kernels/cast.h"
#include "zero/inner_optimizers/own_class.h"
#include "zero/muon.h"

namespace zero {
namespace {

// In this file x is one matrix, or a batch of them in three dimensions. G is the Gram matrix of the
// shorter side: x x^T, or x^T x for a tall x, which needs no transposed copy.
bool is_tall(const at::Tensor& x) { return x.size(-2) > x.size(-1); }

void normalise(at::Tensor& matrix, double eps) {
  matrix.div_(euclidean_norm(matrix, matrix.scalar_type()).clamp_min_(eps));
}

// The result of a product, or a factor of one, in place.
at::Tensor as_factor(at::Tensor x, const NewtonSchulz& o) {
  if (!o.rounded) return x;
  TORCH_INTERNAL_ASSERT(x.is_cpu() && x.scalar_type() == at::kFloat &&
                        x.is_non_overlapping_and_dense());
  kernels::round_to_bfloat16(x.mutable_data_ptr<float>(), x.numel());
  return x;
}

// beta * added + alpha * left * right. Without `added`, beta is 0 and alpha 1.
struct Sum {
  at::Tensor added;
  double beta = 0, alpha = 1;
};

at::Tensor product(const at::Tensor& left, const at::Tensor& right, const NewtonSchulz& o,
                   const Sum& sum = {}) {
  if (!sum.added.defined()) return as_factor(at::matmul(left, right), o);
  return as_factor(left.dim() == 2 ? at::addmm(sum.added, left, right, sum.beta, sum.alpha)
                                   : at::baddbmm(sum.added, left, right, sum.beta, sum.alpha),
                   o);
}

// The product of a large matrix on a CPU is cut into four strips of rows. Each is computed from the
// diagonal on, which is 5/8 of the multiplications, and its transpose is copied below the diagonal.
constexpr int64_t kStrips = 4;

// Measured on one core with AVX-512, over the time of one product: in bf16 1.08 for sides of 256,
// 0.80 for 384 and 0.69 for 768, in fp32 0.78, 0.71 and 0.72; for [384, 1536] * [1536, 384] 0.71
// and 0.64. A GPU would be idle for a part of the time.
bool is_cut(const at::Tensor& left) {
  return left.is_cpu() && left.dim() == 2 &&
         left.size(0) * left.size(0) * left.size(1) >= int64_t{1} << 25;
}

// The same as product(), for a result that is symmetric.
at::Tensor symmetric_product(const at::Tensor& left, const at::Tensor& right, const NewtonSchulz& o,
                             const Sum& sum = {}) {
  if (!is_cut(left)) return product(left, right, o, sum);
  const int64_t side = left.size(0);
  at::Tensor result = at::empty({side, side}, left.options());
  for (int64_t i = 0; i < kStrips; ++i) {
    const int64_t begin = side * i / kStrips, end = side * (i + 1) / kStrips;
    const auto strip = [&](const at::Tensor& matrix) {
      return matrix.narrow(0, begin, end - begin);
    };
    const auto from_diagonal = [&](const at::Tensor& matrix) {
      return matrix.narrow(1, begin, side - begin);
    };
    at::Tensor upper = from_diagonal(strip(result));
    if (sum.added.defined()) {
      at::addmm_out(upper, from_diagonal(strip(sum.added)), strip(left), from_diagonal(right),
                    sum.beta, sum.alpha);
    } else {
      at::mm_out(upper, strip(left), from_diagonal(right));
    }
    result.narrow(0, end, side - end)
        .narrow(1, begin, end - begin)
        .copy_(upper.narrow(1, end - begin, side - end).t());
  }
  return as_factor(std::move(result), o);
}

at::Tensor gram(const at::Tensor& x, const NewtonSchulz& o) {
  const at::Tensor transposed = x.transpose(-2, -1);
  return is_tall(x) ? symmetric_product(transposed, x, o) : symmetric_product(x, transposed, o);
}

// The symmetric matrix shift * I + rest. Near a multiple of I, bf16 has more bits for `rest` than
// for the sum.
struct Shifted {
  double shift = 0;
  at::Tensor rest;
};

// a I + b G + c G^2, in powers of G - centre * I.
Shifted polynomial(const at::Tensor& gram, double centre, const NewtonSchulz& o) {
  const auto [a, b, c] = o.coefficients;
  at::Tensor moved = gram;
  if (centre != 0) {
    moved = gram.clone();
    moved.diagonal(0, -2, -1).sub_(centre);
    moved = as_factor(std::move(moved), o);
  }
  return {a + centre * (b + centre * c),
          symmetric_product(moved, moved, o, {moved, b + 2 * centre * c, c})};
}

// The product, of matrices that commute.
at::Tensor multiply(const Shifted& p, const at::Tensor& symmetric, const NewtonSchulz& o) {
  return symmetric_product(p.rest, symmetric, o, {symmetric, p.shift, 1});
}

// add() with a factor would round the factor to bf16, and some sums twice, depending on their place
// in the batch.
Shifted multiply(const Shifted& p, const Shifted& q, const NewtonSchulz& o) {
  const at::Tensor sum = p.rest.mul(q.shift).add_(q.rest.mul(p.shift));
  return {p.shift * q.shift, symmetric_product(p.rest, q.rest, o, {sum, 1, 1})};
}

// p x, or x p for a tall x.
at::Tensor apply(const Shifted& p, const at::Tensor& x, const NewtonSchulz& o) {
  const Sum shifted{x, p.shift, 1};
  return is_tall(x) ? product(x, p.rest, o, shifted) : product(p.rest, x, o, shifted);
}

// True where two iterations at a time are clearly faster. With sides m <= n, two have seven
// products of m^3 in place of two, and two of m^2 n in place of four. Measured on a CPU in bf16, 64
// x 256 takes 1.13 of the time, 128 x 512 0.92 and 192 x 768 0.87. On a GPU, 2048 is an estimate:
// smaller products take about as long there as it takes to start them.
bool is_paired(const at::Tensor& x) {
  const auto [side, length] = std::minmax({x.size(-2), x.size(-1)});
  return side >= (x.is_cpu() ? 192 : 2048) && length >= 2 * side;
}

// Where most eigenvalues of the Gram matrix are in an iteration: nearly zero in a large matrix of
// norm 1, and around one in the end. Any number gives the same polynomial but for rounding.
double centre_of(int64_t step) { return step < 2 ? 0 : step == 2 ? 0.5 : 1; }

// Repeats x = P(G) x with P(G) = a I + b G + c G^2 and G = x x^T. G and all P(G) commute, so that
// two iterations are x = (P(G') P(G)) x with G' = P(G) (P(G) G). Then x is formed, and G from it: a
// Gram matrix in bf16 has errors of 2^-9 of its largest eigenvalue, which grow by a^2 per iteration
// in the place of its small eigenvalues. The third iteration is alone, where many singular values
// are between small and one. So the error is 0.6 to 1.1 times that of one iteration at a time in
// bf16, and was up to 12 times it with three at once.
at::Tensor iterate(at::Tensor x, const NewtonSchulz& o) {
  x = as_factor(std::move(x), o);
  if (!is_paired(x)) {
    for (int64_t step = 0; step < o.steps; ++step) x = apply(polynomial(gram(x, o), 0, o), x, o);
    return x;
  }
  for (int64_t step = 0; step < o.steps;) {
    at::Tensor g = gram(x, o);
    Shifted p = polynomial(g, centre_of(step), o);
    if (step != 2 && step + 1 < o.steps) {
      g = multiply(p, multiply(p, g, o), o);
      p = multiply(polynomial(g, centre_of(++step), o), p, o);
    }
    x = apply(p, x, o);
    ++step;
  }
  return x;
}

thread_local std::optional<bool> pretended;

// Of the processor, as libtorch asks it before it calls oneDNN. libtorch without oneDNN lacks it.
bool processor_has_bf16_products() {
  const auto found =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
  return found && found->typed<bool()>().call();
}

}  // namespace

bool has_bf16_products(at::Device device) {
  static const bool processor = processor_has_bf16_products();
  return !device.is_cpu() || pretended.value_or(processor);
}

void pretend_bf16_products(std::optional<bool> present) { pretended = present; }

at::Tensor newton_schulz(const at::Tensor& matrix, const NewtonSchulz& o) {
  at::Tensor x = matrix.to(o.dtype, /*non_blocking=*/false, /*copy=*/true);
  normalise(x, o.eps);
  return iterate(std::move(x), o);
}

// Measured on one core with AVX-512, 5 steps: in bf16, 64 matrices of 64 x 64 take 1.5 ms in a
// batch and 14.4 ms one by one, and 16 of 256 x 256 take 16.6 and 20.0 ms; in fp32, 64 of 32 x 32
// take 0.8 and 2.4 ms, and 32 of 128 x 128 take 21.8 and 19.2 ms. From 512 on there is no gain.
//
// An owner's number of matrices must change no bit, and torch has several products. In bf16,
// oneDNN's is for more than 16^3 multiplications, those of a whole batch added up. In fp32, MKL
// cuts the product of one large matrix for several threads, and of a batch only if there are fewer
// matrices; on AMD processors its product of a batch has other bits than those of its matrices, so
// a CPU multiplies fp32 matrices one by one.
bool is_batched(const at::Tensor& matrix, const NewtonSchulz& o) {
  const auto [side, length] = std::minmax({matrix.size(0), matrix.size(1)});
  if (o.dtype == c10::ScalarType::BFloat16) return side > 16 && side <= 256;
  return !matrix.is_cpu() && side * side * length <= int64_t{1} << 16;
}

// Each matrix is normalised by itself, since a reduction over a batch adds up in an order that
// depends on the number of matrices. So does oneDNN's product of x^T and a tall x, so that a tall
// one is transposed here.
std::vector<at::Tensor> newton_schulz_batch(const std::vector<at::Tensor>& matrices,
                                            const NewtonSchulz& o) {
  const at::Tensor& first = matrices.front();
  const bool tall = is_tall(first);
  const auto [rows, columns] = std::minmax({first.size(0), first.size(1)});
  const auto count = static_cast<int64_t>(matrices.size());
  at::Tensor x = at::empty({count, rows, columns}, first.options().dtype(o.dtype));
  for (int64_t i = 0; i < count; ++i) {
    at::Tensor matrix = x.select(0, i);
    matrix.copy_(tall ? matrices[i].t() : matrices[i]);
    normalise(matrix, o.eps);
  }
  x = iterate(std::move(x), o);
  return (tall ? x.transpose(1, 2) : x).unbind(0);
}

}  // namespace zero
