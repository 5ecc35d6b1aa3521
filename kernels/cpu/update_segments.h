// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how adam_step, sgd_step and lion_step run over their segments on the CPU. Includers need
// -fopenmp, as those of block_map.h do.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "kernels/cpu/block_map.h"

namespace zero::kernels {

// Calls update(i, begin, end, coefficient) on several threads for elements [begin, end) of segment
// i, until all elements were covered once, or not at all where *nonfinite is not 0.
template <class Segment, class Update>
void update_segments(c10::ArrayRef<Segment> segments, const float* gradient_coefficient,
                     const double* nonfinite, const Update& update) {
  // Also true for NaN: when in doubt the step is skipped.
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  const BlockMap map(static_cast<int64_t>(segments.size()),
                     [&](int64_t i) { return segments[i].numel; });
  map.parallel_for_each_run(
      [&](int64_t i, int64_t begin, int64_t end, int64_t) { update(i, begin, end, coefficient); });
}

}  // namespace zero::kernels
