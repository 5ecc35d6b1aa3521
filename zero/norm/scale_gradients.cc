// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/scale_gradients.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>

#include "zero/norm/fp32_batches.h"

namespace zero {
namespace {

// In fp32: a product of a 16-bit tensor and a number rounds the number to 16 bits first, which is
// wrong by up to 0.4 % in bf16. `factor` is a 0-dim fp32 tensor.
void scale_16_bit(const at::Tensor& gradient, const at::Tensor& factor) {
  at::Tensor target = gradient;
  if (!gradient.is_non_overlapping_and_dense()) {
    target.copy_(gradient.to(at::kFloat).mul_(factor));
    return;
  }
  target = gradient.as_strided({gradient.numel()}, {1}, gradient.storage_offset());
  for (at::Tensor& piece : target.split(fp32_batch_numel(target.device()))) {
    piece.copy_(piece.to(at::kFloat).mul_(factor));
  }
}

}  // namespace

void scale_by_norm(const std::vector<at::Tensor>& gradients, double max_norm,
                   const at::Tensor& norm, bool host) {
  if (gradients.empty()) return;
  at::Tensor factor;
  if (host) {
    const double known = max_norm / (norm.item<double>() + 1e-6);
    if (known >= 1.0) return;
    factor = at::full({}, known, at::kDouble);
  } else {
    factor =
        norm.to(gradients.front().device()).add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
  }
  const at::Tensor rounded = factor.to(at::kFloat);
  for (const at::Tensor& gradient : gradients) {
    if (gradient.scalar_type() == at::kDouble) {
      gradient.mul_(factor);
    } else if (gradient.scalar_type() == at::kFloat) {
      gradient.mul_(rounded);
    } else {
      scale_16_bit(gradient, rounded);
    }
  }
}

}  // namespace zero
