// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: what the loops of all kernels use. Included once by range_kernels_impl.h, for each
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"

namespace zero::kernels {
namespace {

// Elements of a chunk: two buffers of 4 KiB leave most of the L1 cache to the data.
constexpr int64_t kChunk = 1024;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls f with a null pointer of the C++ type for `type`.
template <class F>
inline void with_type(ElementType type, const F& f) {
  switch (type) {
    case ElementType::kFloat:
      return f(static_cast<float*>(nullptr));
    case ElementType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case ElementType::kHalf:
      return f(static_cast<Half*>(nullptr));
  }
}

}  // namespace
}  // namespace zero::kernels
