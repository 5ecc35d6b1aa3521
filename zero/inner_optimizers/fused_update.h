// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The fused update of an optimizer class: reads the options of the optimizer and keeps the state
// where its own step() keeps it, so that either path can continue what the other began.
//
// How many updates a segment has had is counted in that state, or, where the host is not to wait
// until it knows whether a step was skipped, in memory of the device. The state's own count is then
// behind until set_update_count().
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

#include "bookkeeping/memory.h"
#include "kernels/stream.h"

namespace zero {

// One segment to update; all arrays have the master's length.
struct FusedSegment {
  const at::Tensor* master = nullptr;  // fp32; the key of its state
  const float* gradient = nullptr;
  void* working = nullptr;              // the segment's part of the working row, or null for none
  const float* count = nullptr;         // [1], this update included; null: counted in its state
  Moments moments = Moments::kFloat32;  // how its state is stored where this update makes it
  // The number of its parameter, and its first element in that, for rounding moments.
  int64_t parameter = 0;
  int64_t element = 0;
  // The lower halves of a split master: `master` has no memory then, and `working` the upper ones.
  int16_t* remainder = nullptr;
};

// A segment of a kernel, with all but the state and how it is counted.
template <typename KernelSegment>
KernelSegment kernel_segment(const FusedSegment& segment) {
  KernelSegment result;
  if (segment.remainder == nullptr) result.master = segment.master->mutable_data_ptr<float>();
  result.gradient = segment.gradient;
  result.working = segment.working;
  result.numel = segment.master->numel();
  result.parameter = segment.parameter;
  result.element = segment.element;
  result.remainder = segment.remainder;
  return result;
}

// The same for all segments of a call. Memory of the segments' device, read when the kernel runs.
struct FusedScalars {
  const float* coefficient = nullptr;  // [1], multiplies gradients
  const double* nonfinite = nullptr;   // [1] or null: where it is not 0, nothing is written
  const double* lr = nullptr;          // [1] or null: in place of that of the options
  // The number of the step, for rounding moments: read on the device where `device_step`, [1], is
  // not null.
  int64_t step = 0;
  const double* device_step = nullptr;
};

// Options of a kernel, with what does not depend on the class.
template <typename KernelOptions>
KernelOptions kernel_options(const FusedScalars& scalars) {
  KernelOptions result;
  result.device_lr = scalars.lr;
  result.noise_step = scalars.step;
  result.device_noise_step = scalars.device_step;
  return result;
}

class FusedUpdate {
 public:
  virtual ~FusedUpdate() = default;

  // Makes what step() makes at a parameter's first update, unless it is there, with averages stored
  // as `moments` says. True if it was not.
  virtual bool prepare_state(torch::optim::Optimizer& optimizer, int64_t group,
                             const at::Tensor& master, Moments moments) const = 0;

  // Returns whether an update with the options of `group` reads and writes the state. One that does
  // not is not counted.
  virtual bool uses_state(const torch::optim::Optimizer&, int64_t /*group*/) const { return true; }

  // Updates `segments`, at least one, all of parameter group `group` and on the device of
  // `stream`. Makes their state.
  virtual void update(torch::optim::Optimizer& optimizer, int64_t group,
                      const std::vector<FusedSegment>& segments, const FusedScalars& scalars,
                      c10::ScalarType working_dtype, kernels::Stream stream) const = 0;

  // The number of updates in the state of `master`: 0 without state. A class that does not count
  // returns 1 with state.
  virtual int64_t update_count(const torch::optim::Optimizer& optimizer,
                               const at::Tensor& master) const = 0;
  // Sets that number, above 0, in a class that counts.
  virtual void set_update_count(torch::optim::Optimizer& /*optimizer*/,
                                const at::Tensor& /*master*/, int64_t /*count*/) const {}
};

}  // namespace zero
