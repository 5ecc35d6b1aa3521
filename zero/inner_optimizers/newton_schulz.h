// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The Newton-Schulz iteration of zero::Muon. zero/muon.h has its formula and its source.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace zero {

struct NewtonSchulz {
  std::tuple<double, double, double> coefficients;
  double eps = 0;
  int64_t steps = 0;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;
  // With dtype kFloat: rounds the elements of every factor to bfloat16, as `dtype` kBFloat16 does.
  bool rounded = false;
};

// Returns the orthogonalised matrix, with the shape of `matrix` and the dtype of `o`. `matrix`
// keeps its values. The distance from the formula in exact arithmetic is at most about that of the
// formula computed as it is written in the same dtype.
at::Tensor newton_schulz(const at::Tensor& matrix, const NewtonSchulz& o);

// True for a shape that newton_schulz_batch() is faster for, and has the same bits for in a batch
// of any size.
bool is_batched(const at::Tensor& matrix, const NewtonSchulz& o);

// The same for matrices of one shape, not empty, in one batch. The result of a matrix may differ in
// bits from newton_schulz(), but not with the number of matrices.
std::vector<at::Tensor> newton_schulz_batch(const std::vector<at::Tensor>& matrices,
                                            const NewtonSchulz& o);

// Makes has_bf16_products() of a CPU return this on this thread: for tests of both answers.
void pretend_bf16_products(std::optional<bool> present);

}  // namespace zero
