// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One segment of the plan with its tensors on this rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <cstdint>

#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"

namespace zero {

// The tensors are dense: 1-D, or the parameter's shape and memory order with a layout of whole
// parameters.
struct SegmentTensors {
  Segment segment;
  int64_t group = 0;                    // parameter group
  Moments moments = Moments::kFloat32;  // how its state is stored
  at::Tensor master;                    // fp32 view of the bucket's master row
  at::Tensor gradient;                  // view of the bucket's gradient shard, of its dtype
  // fp32 view of the bucket's averaged row; undefined without ZeroOptions::ema.
  at::Tensor ema = {};
};

// The elements of `tensor`, which has the sizes of `master`, in the memory order of `master`: 1-D,
// the same memory where it is in that order already.
inline at::Tensor elements_of(const at::Tensor& tensor, const at::Tensor& master) {
  if (tensor.strides() != master.strides() && tensor.numel() > 1) {
    at::Tensor ordered =
        at::empty_strided(master.sizes(), master.strides(), tensor.detach().options());
    return elements_of(ordered.copy_(tensor.detach()), master);
  }
  return tensor.detach().as_strided({tensor.numel()}, {1});
}
// The inverse: a view of `elements`.
inline at::Tensor in_shape_of(const at::Tensor& elements, const at::Tensor& master) {
  return elements.as_strided(master.sizes(), master.strides());
}

}  // namespace zero
