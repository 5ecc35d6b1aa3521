// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// torch::optim's AdamW, Adam and SGD on the fused kernels: reads their options
// and keeps their state where they keep it themselves, so that either path can
// continue what the other began.
//
// How many updates a segment has had is counted in that state, or, where the host is not to wait
// until it knows whether a step was skipped, in memory of the device. The state's own count is then
// behind until set_update_count().
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace zero {

// One segment to update; all arrays have the master's length.
struct FusedSegment {
  const at::Tensor* master = nullptr;  // fp32, 1-D; the key of its state
  const float* gradient = nullptr;
  void* working = nullptr;       // the segment's part of the working row, or null for none
  const float* count = nullptr;  // [1], this update included; null: counted in its state
};

// The same for all segments of a step. Memory of the segments' device, read when the kernel runs.
struct FusedScalars {
  const float* coefficient = nullptr;  // [1], multiplies gradients
  const double* nonfinite = nullptr;   // [1] or null: where it is not 0, nothing is written
};

// True when the kernels exist for an optimizer of exactly this class.
bool has_fused_update(const torch::optim::Optimizer& optimizer);

// Makes what torch makes at a parameter's first update, unless it is there. True if it was not.
bool make_fused_state(torch::optim::Optimizer& optimizer, int64_t group, const at::Tensor& master);

// Updates `segments`, all of parameter group `group` and on one device. Makes their state.
void fused_update(torch::optim::Optimizer& optimizer, int64_t group,
                  const std::vector<FusedSegment>& segments, const FusedScalars& scalars,
                  c10::ScalarType working_dtype);

// The updates that the state of `master` tells of: 0 without state. SGD's state tells only whether
// there were any.
int64_t update_count(const torch::optim::Optimizer& optimizer, const at::Tensor& master);
// Makes the state tell of `count` updates. It is dropped for 0: what it holds was never written.
void set_update_count(torch::optim::Optimizer& optimizer, const at::Tensor& master, int64_t count);

}  // namespace zero
