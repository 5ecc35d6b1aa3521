// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how the CPU loops of updates read and write masters and working values. Included once by
// range_kernels_impl.h, for each instruction set.
//
// P is the type of masters: float, or int16_t for the lower halves of split_master.h, whose upper
// halves are the working values. W is the type of working values, or NoWorking.
#pragma once

#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/detail/split_master.h"

namespace zero::kernels {
namespace {

// Without a working parameter nothing is written beside the master.
struct NoWorking {};

template <class W>
inline W* working_at(W* working, int64_t begin) {
  return __is_same(W, NoWorking) ? nullptr : working + begin;
}

inline void store_one(float value, float& destination) { destination = value; }
inline void store_one(float value, BFloat16& destination) {
  destination = narrow_one_bfloat16(value);
}
inline void store_one(float value, Half& destination) { destination = narrow_one_half(value); }

// Element i of a master: p[i], or where `p` has lower halves, the number that working[i] is the
// upper half of.
template <class W>
inline float load_master(const float* p, const W*, int64_t i) {
  return p[i];
}
inline float load_master(const int16_t* p, const BFloat16* working, int64_t i) {
  return join_master(working[i].bits, p[i]);
}

// Writes it, and the working value.
template <class W>
inline void store_master(float value, float* p, W* working, int64_t i) {
  p[i] = value;
  if constexpr (!__is_same(W, NoWorking)) {
    store_one(value, working[i]);
  }
}
inline void store_master(float value, int16_t* p, BFloat16* working, int64_t i) {
  uint16_t upper = 0;
  int16_t lower = 0;
  split_master(value, upper, lower);
  p[i] = lower;
  working[i].bits = upper;
}

}  // namespace
}  // namespace zero::kernels
