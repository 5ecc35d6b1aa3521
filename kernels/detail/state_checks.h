// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: what AdamSegment, SgdSegment and LionSegment must hold for their stored state.
#pragma once

#include <c10/util/Exception.h>

#include "kernels/segments.h"

namespace zero::kernels {

// Throws c10::Error, naming `function`, where the noise of a segment has no place.
template <class Segment>
void check_state(const Segment& segment, const char* function) {
  if (segment.state_type == StateType::kFloat) return;
  TORCH_CHECK(segment.element >= 0 && segment.element % kStateBlock == 0,
              "zero::kernels::", function, ": element must be a multiple of ", kStateBlock,
              " where state is not fp32, got ", segment.element);
  TORCH_CHECK(false, "zero::kernels::", function, ": state is not fp32, which is still to come");
}

}  // namespace zero::kernels
