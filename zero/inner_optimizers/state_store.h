// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The memory of one state tensor of a segment: its allocation, and its elements in the form in
// which checkpoints cut them for other numbers of ranks. Only this file and the kernels depend on
// how a state is stored.
//
// It is in this room because the state is in the inner optimizer's state(), where torch's classes
// look for it: each state tensor is one at::Tensor, however it is stored. The tensor shows how: it
// is Float, BFloat16, or Byte for blocks of 8-bit codes, as kernels/stored_state.h describes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "bookkeeping/memory.h"
#include "kernels/segments.h"

namespace zero {

// What a state tensor is to its class, which decides the code of its elements.
enum class StateRole {
  kPlain,         // fp32, whatever ZeroOptions::moments says
  kAverage,       // of any sign
  kSecondMoment,  // 0 or more, and used by its root
};

// Returns the state of a segment, in the segment's shape and memory order, or 1-D where it is
// stored in blocks. `moments` must be kFloat32 with kPlain.
at::Tensor zero_state(const at::Tensor& segment, Moments moments);
at::Tensor empty_state(const at::Tensor& segment, Moments moments);

kernels::StateType state_type(const at::Tensor& stored);

// Returns the elements in fp32 and in the segment's shape and memory order, in which they can be
// cut between any two: `stored` itself where it is fp32, else a copy, which is in host memory where
// `stored` has blocks. State of a plain optimizer of torch may have any floating dtype.
at::Tensor state_elements(const at::Tensor& stored, StateRole role, const at::Tensor& segment);
// The inverse: rounds fp32 elements, of any device, to nearest, on the device of `segment`. It
// restores every bit of a whole block that state_elements() returned, except of second moments that
// are all below 2^-94. It may take over `elements`.
at::Tensor stored_state(const at::Tensor& elements, StateRole role, Moments moments,
                        const at::Tensor& segment);

}  // namespace zero
