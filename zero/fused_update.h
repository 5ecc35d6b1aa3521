// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// torch::optim's AdamW, Adam and SGD on the fused kernels: reads their options
// and keeps their state where they keep it themselves, so that either path can
// continue what the other began.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

namespace zero {

// One segment to update; all arrays have the master's length.
struct FusedSegment {
  const at::Tensor* master = nullptr;  // fp32, 1-D; the key of its state
  const float* gradient = nullptr;
  void* working = nullptr;  // the segment's part of the working row, or null for none
};

// True when the kernels exist for an optimizer of exactly this class.
bool has_fused_update(const torch::optim::Optimizer& optimizer);

// Updates `segments`, all of parameter group `group` and on one device, from
// *coefficient * gradient, where `coefficient` is memory of that device and read when the kernel
// runs. State is made on first use, as torch does.
void fused_update(torch::optim::Optimizer& optimizer, int64_t group,
                  const std::vector<FusedSegment>& segments, const float* coefficient,
                  c10::ScalarType working_dtype);

}  // namespace zero
