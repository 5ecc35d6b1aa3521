// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Multiplies gradients in place by the factor of a clip, min(1, max_norm / (norm + 1e-6)), as
// torch's clip_grad_norm_ does. Gradients may have any real floating dtype and any strides; 16-bit
// ones are multiplied in fp32 and rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zero {

// `norm` is 0-dim fp64 on any device. With `host` it is read, and a factor of 1 touches nothing.
// Without, nothing waits for a device, and so all are multiplied: a factor of 1 leaves every bit.
void scale_by_norm(const std::vector<at::Tensor>& gradients, double max_norm,
                   const at::Tensor& norm, bool host);

}  // namespace zero
