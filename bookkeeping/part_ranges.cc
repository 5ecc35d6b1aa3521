// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/part_ranges.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace zero {
namespace {

// A row is all that follows the fastest dimension in which any box is cut, with that dimension: its
// elements are consecutive in every box.
class CommonRows {
 public:
  CommonRows(const TensorBox& wanted, c10::ArrayRef<TensorBox> stored) : cut_(0) {
    for (const TensorBox& s : stored) {
      TORCH_INTERNAL_ASSERT(s.sizes.size() == wanted.sizes.size(), "boxes of one tensor");
      for (size_t d = 0; d < wanted.sizes.size(); ++d) {
        if (s.sizes[d] != wanted.sizes[d] || s.from[d] != wanted.from[d]) cut_ = d;
      }
    }
    for (size_t d = cut_ + 1; d < wanted.sizes.size(); ++d) inner_ *= wanted.sizes[d];
  }

  // The elements of one row of `box`, and the place of the first of them in a row of the whole.
  int64_t length(const TensorBox& box) const {
    return box.sizes.empty() ? 1 : box.sizes[cut_] * inner_;
  }
  int64_t place(const TensorBox& box) const {
    return box.sizes.empty() ? 0 : box.from[cut_] * inner_;
  }

  // The row of `to` that is row `row` of `of`; -1 if it has none.
  int64_t same_row(const TensorBox& of, int64_t row, const TensorBox& to) const {
    int64_t result = 0;
    int64_t factor = 1;
    for (size_t d = cut_; d-- > 0;) {
      const int64_t at = row % of.sizes[d] + of.from[d] - to.from[d];
      row /= of.sizes[d];
      if (at < 0 || at >= to.sizes[d]) return -1;
      result += at * factor;
      factor *= to.sizes[d];
    }
    return result;
  }

 private:
  size_t cut_;
  int64_t inner_ = 1;
};

struct PlacedRange {
  int64_t at = 0;  // in the wanted part
  PartRange range;
};

// Appends a range, joined with the last one if it goes on where that ends.
void append(const PartRange& range, std::vector<PartRange>& ranges) {
  if (!ranges.empty() && ranges.back().stored == range.stored &&
      ranges.back().begin + ranges.back().numel == range.begin) {
    ranges.back().numel += range.numel;
  } else {
    ranges.push_back(range);
  }
}

}  // namespace

std::vector<PartRange> part_ranges(const TensorBox& wanted, int64_t begin, int64_t numel,
                                   c10::ArrayRef<TensorBox> stored) {
  std::vector<PartRange> result;
  if (numel == 0) return result;
  const CommonRows rows(wanted, stored);
  const int64_t length = rows.length(wanted);
  std::vector<PlacedRange> placed;
  for (int64_t row = begin / length; row * length < begin + numel; ++row) {
    const int64_t first = std::max(begin - row * length, int64_t{0});
    const int64_t last = std::min(begin + numel - row * length, length);
    for (size_t s = 0; s < stored.size(); ++s) {
      // From a place in a wanted row to one in a stored row.
      const int64_t shift = rows.place(wanted) - rows.place(stored[s]);
      const int64_t from = std::max(first, -shift);
      const int64_t to = std::min(last, rows.length(stored[s]) - shift);
      if (from >= to) continue;
      const int64_t there = rows.same_row(wanted, row, stored[s]);
      if (there < 0) continue;
      placed.push_back(
          {row * length + from,
           {static_cast<int64_t>(s), there * rows.length(stored[s]) + from + shift, to - from}});
    }
  }
  std::ranges::sort(placed, {}, &PlacedRange::at);
  int64_t next = begin;
  for (const PlacedRange& p : placed) {
    TORCH_CHECK(p.at == next, "expected every element in one stored part, got element ",
                std::min(p.at, next), " in ", p.at < next ? "two" : "none");
    next += p.range.numel;
    append(p.range, result);
  }
  TORCH_CHECK(next == begin + numel, "expected every element in one stored part, got element ",
              next, " in none");
  return result;
}

namespace {

// A row of a part is dimension `along` with all that follow it. Box `box` has in_box elements of
// the in_part elements of each row, behind the `before` elements of other boxes.
struct BoxRows {
  BoxRows(const TensorPart& part, size_t box) {
    for (size_t b = 0; b < part.boxes.size(); ++b) {
      const std::vector<int64_t>& sizes = part.boxes[b].sizes;
      int64_t row = 1;
      for (size_t d = part.along; d < sizes.size(); ++d) row *= sizes[d];
      if (b < box) before += row;
      if (b == box) in_box = row;
      in_part += row;
    }
  }
  int64_t in_box = 0;
  int64_t in_part = 0;
  int64_t before = 0;
};

// Appends a range of a box as ranges of its part.
void append(const PartRange& of_box, int64_t part, const BoxRows& rows,
            std::vector<PartRange>& ranges) {
  for (int64_t done = 0; done < of_box.numel;) {
    const int64_t row = (of_box.begin + done) / rows.in_box;
    const int64_t at = (of_box.begin + done) % rows.in_box;
    const int64_t numel = std::min(of_box.numel - done, rows.in_box - at);
    append({part, row * rows.in_part + rows.before + at, numel}, ranges);
    done += numel;
  }
}

}  // namespace

std::vector<PartRange> part_ranges(const TensorPart& wanted, int64_t begin, int64_t numel,
                                   c10::ArrayRef<TensorPart> stored) {
  // 1. All stored boxes, with their places in their parts.
  std::vector<TensorBox> boxes;
  std::vector<int64_t> part_of;
  std::vector<BoxRows> rows_of;
  for (size_t p = 0; p < stored.size(); ++p) {
    for (size_t b = 0; b < stored[p].boxes.size(); ++b) {
      boxes.push_back(stored[p].boxes[b]);
      part_of.push_back(static_cast<int64_t>(p));
      rows_of.emplace_back(stored[p], b);
    }
  }
  std::vector<BoxRows> own;
  for (size_t b = 0; b < wanted.boxes.size(); ++b) own.emplace_back(wanted, b);
  // 2. The range, cut where it goes from one box to another, row by row.
  std::vector<PartRange> result;
  const int64_t end = begin + numel;
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / own.front().in_part;
    const int64_t place = at % own.front().in_part;
    size_t b = 0;
    while (place >= own[b].before + own[b].in_box) ++b;
    const int64_t in_box = place - own[b].before;
    // All rows of a part that is one box follow each other.
    const int64_t count = own.size() == 1 ? end - at : std::min(end - at, own[b].in_box - in_box);
    // 3. Where its elements are.
    for (const PartRange& range :
         part_ranges(wanted.boxes[b], row * own[b].in_box + in_box, count, boxes)) {
      append(range, part_of[range.stored], rows_of[range.stored], result);
    }
    at += count;
  }
  return result;
}

}  // namespace zero
