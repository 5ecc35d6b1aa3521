// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Finds which elements to copy where when another number of ranks reads the pieces of parameters
// that one number of ranks stored. Pure arithmetic on ranges.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace zero {

// The elements [begin, begin + numel) of a parameter, in its memory order.
struct ParameterRange {
  int64_t parameter = 0;
  int64_t begin = 0;
  int64_t numel = 0;
};

// The elements that stored range `stored` and wanted range `wanted` share, with their place in
// each.
struct RangeOverlap {
  int64_t stored = 0;
  int64_t wanted = 0;
  int64_t stored_begin = 0;
  int64_t wanted_begin = 0;
  int64_t numel = 0;
};

// Returns the overlaps that fill every wanted range, ordered by stored range, so that each of those
// is read once. Empty ranges are ignored. O((S + W) log S + overlaps). Throws c10::Error when
// stored ranges overlap each other, or leave a hole in a wanted range.
std::vector<RangeOverlap> reshard(c10::ArrayRef<ParameterRange> stored,
                                  c10::ArrayRef<ParameterRange> wanted);

}  // namespace zero
