// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of block_int8.h. Included once by range_kernels_impl.h; everything has
// internal linkage (see range_kernels.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"

namespace zero::kernels {
namespace {

// 1.5 * 2^23: added to a small float it leaves the float's value, rounded to an integer, in the
// lowest bits. Unlike rintf() it becomes one instruction in every instruction set.
constexpr float kRounder = 12582912.0F;
constexpr uint32_t kRounderBits = 0x4b400000U;
// The largest float of which 127 are no infinity.
constexpr float kLargestScale = 0x1.020406p+121F;

inline void encode_one_block(const float* __restrict x, int64_t numel, float* __restrict scale,
                             int8_t* __restrict values) {
  uint32_t largest = 0;  // the order of the bits is that of |x|
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = bits_of(x[i]) & 0x7fffffffU;
    largest = largest < bits ? bits : largest;
  }
  const bool finite = largest < 0x7f800000U;
  const float exact = float_of(largest) / 127.0F;
  const float s = !finite ? float_of(0x7fc00000U) : exact > kLargestScale ? kLargestScale : exact;
  *scale = s;
  // Not s > 0: the scale of a NaN is one.
  if (!finite || s == 0.0F) {
    for (int64_t i = 0; i < numel; ++i) values[i] = 0;
    return;
  }
  for (int64_t i = 0; i < numel; ++i) {
    // A scale that is subnormal is rounded so much that 127 may be exceeded.
    float q = x[i] / s;
    q = q > 127.0F ? 127.0F : q;
    q = q < -127.0F ? -127.0F : q;
    values[i] = static_cast<int8_t>(static_cast<int32_t>(bits_of(q + kRounder) - kRounderBits));
  }
}

template <class T>
inline void encode_blocks(const T* source, int64_t numel, float* scales, int8_t* values) {
  float x[kInt8Block];
  for (int64_t begin = 0; begin < numel; begin += kInt8Block) {
    const int64_t n = numel - begin < kInt8Block ? numel - begin : kInt8Block;
    widen(source + begin, x, n);
    encode_one_block(x, n, scales + begin / kInt8Block, values + begin);
  }
}

void encode_block_int8_range(const void* source, ElementType source_type, int64_t numel,
                             float* scales, int8_t* values) {
  switch (source_type) {
    case ElementType::kFloat:
      return encode_blocks(static_cast<const float*>(source), numel, scales, values);
    case ElementType::kBFloat16:
      return encode_blocks(static_cast<const BFloat16*>(source), numel, scales, values);
    case ElementType::kHalf:
      return encode_blocks(static_cast<const Half*>(source), numel, scales, values);
  }
}

template <bool kFirst>
inline void add_block(float scale, const int8_t* __restrict values, int64_t numel,
                      float* __restrict sum) {
  for (int64_t i = 0; i < numel; ++i) {
    const float decoded = scale * static_cast<float>(values[i]);
    sum[i] = kFirst ? decoded : sum[i] + decoded;
  }
}

template <bool kAccumulate>
inline void finish_block(float factor, const float* __restrict sum, int64_t numel,
                         float* __restrict shard) {
  for (int64_t i = 0; i < numel; ++i) {
    const float product = factor * sum[i];
    shard[i] = kAccumulate ? shard[i] + product : product;
  }
}

void sum_block_int8_range(const SumBlockInt8Range& range) {
  const auto row = [&](int64_t r) {
    if (range.rows != nullptr) return static_cast<const char*>(range.rows[r]);
    return r == range.own_rank ? static_cast<const char*>(range.own)
                               : static_cast<const char*>(range.received) + r * range.row_bytes;
  };
  float sum[kInt8Block];
  for (int64_t begin = range.begin; begin < range.end; begin += kInt8Block) {
    const int64_t n = range.end - begin < kInt8Block ? range.end - begin : kInt8Block;
    for (int64_t r = 0; r < range.world_size; ++r) {
      const char* const from = row(r);
      const float scale = reinterpret_cast<const float*>(from)[begin / kInt8Block];
      const int8_t* const values =
          reinterpret_cast<const int8_t*>(from) + range.values_begin + begin;
      r == 0 ? add_block<true>(scale, values, n, sum) : add_block<false>(scale, values, n, sum);
    }
    range.accumulate ? finish_block<true>(range.factor, sum, n, range.shard + begin)
                     : finish_block<false>(range.factor, sum, n, range.shard + begin);
  }
}

}  // namespace
}  // namespace zero::kernels
