// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One segment of the plan with its tensors on this rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "bookkeeping/plan.h"

namespace zero {

// Both tensors are 1-D, of the segment's length.
struct SegmentTensors {
  Segment segment;
  int64_t group = 0;    // parameter group
  at::Tensor master;    // fp32 view of the bucket's master row
  at::Tensor gradient;  // fp32 view of the bucket's gradient shard
};

}  // namespace zero
