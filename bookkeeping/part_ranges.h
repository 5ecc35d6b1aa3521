// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Finds where the elements of a part of a tensor are in other parts of it, as when a tensor that is
// cut in two along its columns is read by four ranks, or by ranks that cut it along its rows. Pure
// arithmetic.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace zero {

// A box of elements in a whole tensor. Dimensions are in memory order, the slowest first, and the
// part itself is dense in that order.
struct TensorBox {
  std::vector<int64_t> from;   // in the whole
  std::vector<int64_t> sizes;  // of the part
  friend bool operator==(const TensorBox&, const TensorBox&) = default;
};

// A part of several boxes of the whole, one behind the other along dimension `along` of the part: a
// rank's rows of q, k and v in one matrix. Boxes differ along it alone.
struct TensorPart {
  std::vector<TensorBox> boxes;
  size_t along = 0;  // in memory order
  friend bool operator==(const TensorPart&, const TensorPart&) = default;
};

// The elements [begin, begin + numel) of stored part `stored`, in its memory order.
struct PartRange {
  int64_t stored = 0;
  int64_t begin = 0;
  int64_t numel = 0;
};

// Returns the ranges that make up the elements [begin, begin + numel) of `wanted`, in their order.
// O(ranges log ranges + rows of those elements times stored parts). Throws c10::Error when stored
// parts overlap or leave a hole there. All boxes have the same number of dimensions.
std::vector<PartRange> part_ranges(const TensorBox& wanted, int64_t begin, int64_t numel,
                                   c10::ArrayRef<TensorBox> stored);
// Returns the same for parts. A part of several boxes costs as much as one call above for each box
// and each of its rows, where a row is dimension `along` with all that follow it.
std::vector<PartRange> part_ranges(const TensorPart& wanted, int64_t begin, int64_t numel,
                                   c10::ArrayRef<TensorPart> stored);

}  // namespace zero
