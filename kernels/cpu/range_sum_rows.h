// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of sum_rows.h. Included once by range_kernels_impl.h, for each
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/range_cast.h"
#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_types.h"

namespace zero::kernels {
namespace {

inline float widen_one(float x) { return x; }

template <class T>
inline void add_row(float* __restrict sum, const T* __restrict row, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    sum[i] = sum[i] + widen_one(row[i]);
  }
}

// shard (+)= factor * (before + last), in one loop: the conversion, the last
// addition and the product ride on the memory traffic of the last row.
template <bool kAccumulate, class S, class T>
void finish_rows(float factor, int64_t numel, const S* __restrict before, const T* __restrict last,
                 float* __restrict shard) {
  for (int64_t i = 0; i < numel; ++i) {
    const float product = factor * (widen_one(before[i]) + widen_one(last[i]));
    shard[i] = kAccumulate ? shard[i] + product : product;
  }
}

// One row has nothing to be added to, and may be the shard itself: hence the chunk.
template <class T>
inline void scale_row(const T* row, const SumRowsRange& range) {
  const float factor = range.factor;
  float chunk[kChunk];
  for (int64_t begin = 0; begin < range.numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, range.numel - begin);
    widen(row + begin, chunk, n);
    float* __restrict shard = range.shard + begin;
    for (int64_t i = 0; i < n; ++i) {
      const float product = factor * chunk[i];
      shard[i] = range.accumulate ? shard[i] + product : product;
    }
  }
}

template <class T>
inline void sum_rows_of(const SumRowsRange& range) {
  const auto row = [&](int64_t r) {
    if (range.rows != nullptr) return static_cast<const T*>(range.rows[r]) + range.begin;
    return r == range.own_rank ? static_cast<const T*>(range.own)
                               : static_cast<const T*>(range.received) + r * range.row_stride;
  };
  const int64_t last = range.world_size - 1;
  if (last == 0) {
    return scale_row(row(0), range);
  }
  if (last == 1) {
    const auto finish = range.accumulate ? finish_rows<true, T, T> : finish_rows<false, T, T>;
    return finish(range.factor, range.numel, row(0), row(1), range.shard);
  }
  const auto finish = range.accumulate ? finish_rows<true, float, T> : finish_rows<false, float, T>;
  float sum[kChunk];
  for (int64_t begin = 0; begin < range.numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, range.numel - begin);
    widen(row(0) + begin, sum, n);
    for (int64_t r = 1; r < last; ++r) {
      add_row(sum, row(r) + begin, n);
    }
    finish(range.factor, n, sum, row(last) + begin, range.shard + begin);
  }
}

void sum_rows_range(const SumRowsRange& range) {
  with_type(range.type, [&]<class T>(T*) { sum_rows_of<T>(range); });
}

}  // namespace
}  // namespace zero::kernels
