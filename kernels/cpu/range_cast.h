// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of cast.h. Included once by range_kernels_impl.h, for each
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_types.h"

namespace zero::kernels {
namespace {

inline void cast_range(const float* source, float* destination, int64_t numel) {
  __builtin_memmove(destination, source, static_cast<size_t>(numel) * sizeof(float));
}
inline void cast_range(const BFloat16* source, BFloat16* destination, int64_t numel) {
  __builtin_memmove(destination, source, static_cast<size_t>(numel) * sizeof(BFloat16));
}
inline void cast_range(const Half* source, Half* destination, int64_t numel) {
  __builtin_memmove(destination, source, static_cast<size_t>(numel) * sizeof(Half));
}
template <class T>
inline void cast_range(const T* source, float* destination, int64_t numel) {
  widen(source, destination, numel);
}
template <class T>
inline void cast_range(const float* source, T* destination, int64_t numel) {
  narrow(source, destination, numel);
}
template <class S, class D>
inline void cast_range(const S* source, D* destination, int64_t numel) {
  float chunk[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, numel - begin);
    widen(source + begin, chunk, n);
    narrow(chunk, destination + begin, n);
  }
}

void round_to_bfloat16_range(float* values, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = float_of(nearest_bfloat16(values[i]) & 0xffff0000U);
  }
}

// The addend, or the source, may be the destination: hence the chunks.
inline void add_range(const float* source, const float* addend, float* destination, int64_t numel) {
  float sum[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, numel - begin);
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = addend[begin + i] + source[begin + i];
    }
    cast_range(sum, destination + begin, n);
  }
}
template <class S, class D>
inline void add_range(const S* source, const D* addend, D* destination, int64_t numel) {
  float added[kChunk];
  float sum[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, numel - begin);
    widen(source + begin, added, n);
    widen(addend + begin, sum, n);
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = sum[i] + added[i];
    }
    narrow(sum, destination + begin, n);
  }
}

void cast_copy_range(const void* source, ElementType source_type, void* destination,
                     ElementType destination_type, int64_t numel, const void* addend) {
  with_type(source_type, [&]<class S>(S*) {
    with_type(destination_type, [&]<class D>(D*) {
      const S* from = static_cast<const S*>(source);
      D* to = static_cast<D*>(destination);
      addend != nullptr ? add_range(from, static_cast<const D*>(addend), to, numel)
                        : cast_range(from, to, numel);
    });
  });
}

}  // namespace
}  // namespace zero::kernels
