// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What the tests of 16-bit parameters share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/support/run_ranks.h"
#include "zero/options.h"

namespace zero {

// What fp16 gets by default, but with a scale of the test's choice.
inline ZeroOptions with_scale(double scale) {
  return ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(scale));
}

inline at::Tensor filled(double value, int64_t numel, c10::ScalarType dtype) {
  return at::full({numel}, value, at::TensorOptions().dtype(dtype));
}

class PrecisionAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, PrecisionAt, ::testing::Values(1, 2, 3, 4));

}  // namespace zero
