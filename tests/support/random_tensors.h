// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

// Uniform in [-1, 1), the same for the same seed on every thread and machine.
at::Tensor random_tensor(at::IntArrayRef shape, uint64_t seed);

}  // namespace zero
