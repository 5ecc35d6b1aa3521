// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: what AdamSegment, SgdSegment and LionSegment have in common.
#pragma once

#include <cstdint>

namespace zero::kernels {

// The array that receives working values, or null where nothing is written. The master needs no
// second write, whatever the working dtype is.
template <class Segment>
void* written_working(const Segment& segment) {
  return segment.working == static_cast<void*>(segment.master) ? nullptr : segment.working;
}

template <class Segment>
Segment with_written_working(Segment segment) {
  segment.working = written_working(segment);
  return segment;
}

// fp32 values behind a pointer that may have no type.
inline void advance(float*& values, int64_t by) { values += by; }
inline void advance(void*& values, int64_t by) { values = static_cast<float*>(values) + by; }

// Elements [begin, end) of a segment. `arrays` are its fp32 arrays besides master and gradient;
// those that are null stay null.
template <class Segment, class... Arrays>
Segment part_of(const Segment& segment, int64_t begin, int64_t end, int64_t working_size,
                Arrays... arrays) {
  Segment part = segment;
  if (part.remainder != nullptr) {
    part.remainder += begin;
  } else {
    part.master += begin;
  }
  part.gradient += begin;
  (advance(part.*arrays, part.*arrays != nullptr ? begin : 0), ...);
  part.numel = end - begin;
  part.working = written_working(segment);
  if (part.working != nullptr) {
    part.working = static_cast<char*>(part.working) + begin * working_size;
  }
  return part;
}

}  // namespace zero::kernels
