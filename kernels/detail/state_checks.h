// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: what AdamSegment, SgdSegment and LionSegment must hold for their stored state and for
// their masters.
#pragma once

#include <c10/util/Exception.h>

#include "kernels/cpu/range_kernels.h"
#include "kernels/segments.h"

namespace zero::kernels {

// Throws c10::Error, naming `function`, for a type that does not exist, and for an element at which
// no block begins.
template <class Segment>
void check_state(const Segment& segment, const char* function) {
  if (segment.state_type == StateType::kFloat) return;
  TORCH_CHECK(segment.state_type == StateType::kBFloat16 || segment.state_type == StateType::kInt8,
              "zero::kernels::", function, ": state_type must be kFloat, kBFloat16 or kInt8, got ",
              static_cast<int>(segment.state_type));
  TORCH_CHECK(segment.element >= 0 && segment.element % kStateBlock == 0,
              "zero::kernels::", function, ": element must be a multiple of ", kStateBlock,
              " where state is not fp32, got ", segment.element);
}

// Throws c10::Error, naming `function`, for a segment of elements without a master.
template <class Segment>
void check_master(const Segment& segment, ElementType working_type, const char* function) {
  if (segment.remainder == nullptr) {
    TORCH_CHECK(segment.master != nullptr, "zero::kernels::", function, ": null pointer for ",
                segment.numel, " elements");
    return;
  }
  TORCH_CHECK(segment.master == nullptr, "zero::kernels::", function,
              ": a segment with a remainder has no other master");
  TORCH_CHECK(segment.working != nullptr && working_type == ElementType::kBFloat16,
              "zero::kernels::", function,
              ": a remainder needs a working array, whose dtype is BFloat16");
}

}  // namespace zero::kernels
