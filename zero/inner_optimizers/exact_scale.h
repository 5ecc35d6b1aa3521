// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>

namespace zero {

// x = x * factor, rounded once, as in Python. Tensor::mul_(Scalar) of C++ rounds the factor to the
// dtype of x first, in libtorch 2.11: 0.975 becomes 0.9766 in bf16.
inline void exact_scale(const at::Tensor& x, double factor) {
  x.mul_(at::native::wrapped_scalar_tensor(factor));
}

}  // namespace zero
