// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_tensors.h"

#include <ATen/ops/empty.h>

#include <random>

namespace zero {

at::Tensor random_tensor(at::IntArrayRef shape, uint64_t seed) {
  std::mt19937_64 generator(seed * 0x9E3779B97F4A7C15u + 1);
  at::Tensor result = at::empty(shape, at::kFloat);
  float* data = result.mutable_data_ptr<float>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    data[i] = static_cast<float>(generator() >> 40) * 0x1p-23F - 1.0F;
  }
  return result;
}

}  // namespace zero
