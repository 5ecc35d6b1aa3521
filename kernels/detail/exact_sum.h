// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the fixed-point number of exact_sum.h, written once for the CPU loops and for the CUDA
// kernels. All functions but the last one compute with integers alone.
#pragma once

#include <cstdint>

#include "kernels/detail/update_rules.h"
#include "kernels/segments.h"

namespace zero::kernels {

// Bit 0 of limb 0 stands for 2^-kExactBelow: the square of the smallest float is 2^-298.
constexpr int kExactBelow = 298;
// The mantissa of a double, and what its exponent field is for a mantissa that counts units.
constexpr int kMantissaBits = 52;
constexpr int kUnitExponent = 1023 + kMantissaBits;

ZERO_KERNELS_INLINE uint64_t double_bits(double x) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__double_as_longlong(x));
#else
  return __builtin_bit_cast(uint64_t, x);
#endif
}

ZERO_KERNELS_INLINE double double_of(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(static_cast<long long>(bits));
#else
  return __builtin_bit_cast(double, bits);
#endif
}

ZERO_KERNELS_INLINE bool is_finite_sum(double x) {
  return (double_bits(x) >> 52 & 0x7ffU) < 0x7ffU;
}

// limbs += x, for a finite sum of at most kExactBlock squares. Each limb grows by less than 2^32.
ZERO_KERNELS_INLINE void add_exactly(double x, int64_t* limbs) {
  if (x == 0.0) return;
  const uint64_t bits = double_bits(x);
  uint64_t mantissa = (bits & ((uint64_t{1} << kMantissaBits) - 1)) | uint64_t{1} << kMantissaBits;
  int lowest = static_cast<int>(bits >> kMantissaBits) - (kUnitExponent - kExactBelow);
  if (lowest < 0) {
    mantissa >>= -lowest;  // zeros: x is a multiple of 2^-kExactBelow
    lowest = 0;
  }
  const int shift = lowest % 32;
  int64_t* const limb = limbs + lowest / 32;
  const uint64_t upper = mantissa >> (32 - shift);
  limb[0] += static_cast<uint32_t>(mantissa << shift);
  limb[1] += static_cast<uint32_t>(upper);
  limb[2] += static_cast<int64_t>(upper >> 32);
}

// Makes each limb but the last less than 2^32. The number stays.
ZERO_KERNELS_INLINE void carry_limbs(int64_t* limbs) {
  for (int64_t i = 0; i + 1 < kExactLimbs; ++i) {
    limbs[i + 1] += limbs[i] >> 32;
    limbs[i] &= 0xffffffff;
  }
}

// The number rounded to double, to nearest even; NaN or infinity where those are counted.
ZERO_KERNELS_INLINE double rounded_sum(const int64_t* sum) {
  if (sum[kExactLimbs + 1] != 0) return double_of(uint64_t{0x7ff8} << 48);
  if (sum[kExactLimbs] != 0) return double_of(uint64_t{0x7ff0} << 48);
  // 1. The three highest digits, of 32 bits, and whether a lower one is not zero. The last limb
  //    may have two digits.
  uint64_t carry = 0;
  uint32_t digit = 0, below = 0, second_below = 0;
  bool rest = false;
  uint64_t first_64 = 0;
  uint32_t third = 0;
  bool lower = false;
  int highest = 0;
  for (int i = 0; i <= kExactLimbs; ++i) {
    carry += i < kExactLimbs ? static_cast<uint64_t>(sum[i]) : 0;
    rest = rest || second_below != 0;
    second_below = below;
    below = digit;
    digit = static_cast<uint32_t>(carry);
    carry >>= 32;
    if (digit != 0) {
      first_64 = uint64_t{digit} << 32 | below;
      third = second_below;
      lower = rest;
      highest = i;
    }
  }
  if (first_64 == 0) return 0.0;
  // 2. The 64 bits from the highest one that is set.
  int lowest = 32 * (highest - 1) - kExactBelow;
  while (first_64 >> 63 == 0) {
    first_64 = first_64 << 1 | third >> 31;
    third <<= 1;
    --lowest;
  }
  // 3. What is below them decides ties alone, as their last bit does: a double has 53 bits. The
  //    conversion rounds, and the product with a power of two does not.
  first_64 |= lower || third != 0 ? 1 : 0;
  return static_cast<double>(first_64) * double_of(static_cast<uint64_t>(1023 + lowest) << 52);
}

}  // namespace zero::kernels
