// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: what AdamSegment, SgdSegment and LionSegment must hold for their stored state.
#pragma once

#include <c10/util/Exception.h>

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

}  // namespace zero::kernels
