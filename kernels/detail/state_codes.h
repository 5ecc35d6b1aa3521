// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the codes of stored_state.h, one element at a time, written once for the CPU loops and
// for the CUDA kernels. Products and sums are separate roundings, as in update_rules.h.
//
// An average (exp_avg, momentum) and a root (of exp_avg_sq) differ in the number of codes and in
// the sign. Code q of a block whose largest magnitude is L has the magnitude ((q * q) * kUnit) * L.
#pragma once

#include <cstdint>

#include "kernels/detail/update_rules.h"

namespace zero::kernels {

template <bool kRoot>
struct StateCode {
  static constexpr float kTop = kRoot ? 255.0F : 127.0F;
  static constexpr float kSquares = kTop * kTop;
  static constexpr float kUnit = 1.0F / kSquares;
  static_assert(kUnit * kSquares == 1.0F, "the largest magnitude is stored exactly");
};

// The scale of a block whose largest magnitude is below this, and all its codes, are zero.
constexpr float kSmallestStateScale = 0x1p-100F;

// Of sqrt(FLT_MAX), the largest root whose square is finite.
constexpr int32_t kLargestRootBits = 0x5f7fffff;

ZERO_KERNELS_INLINE uint32_t state_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

ZERO_KERNELS_INLINE float state_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// Their order is that of |x|, and those of a NaN are above those of an infinity.
ZERO_KERNELS_INLINE int32_t magnitude_bits(float x) {
  return static_cast<int32_t>(state_bits(x) & 0x7fffffffU);
}

// The 16 bits of an element's noise that its first or second state array is rounded by.
template <bool kRoot>
ZERO_KERNELS_INLINE uint32_t own_noise(uint32_t noise) {
  return kRoot ? noise >> 16 : noise & 0xffffU;
}

// The scale of a block, from the largest magnitude_bits() of its averages or roots. An infinite
// root counts as that of the largest float, so that second moments are finite from then on.
template <bool kRoot>
ZERO_KERNELS_INLINE float state_scale(int32_t largest_bits) {
  if constexpr (kRoot) {
    largest_bits = largest_bits == 0x7f800000 ? kLargestRootBits : largest_bits;
  }
  const float largest = state_float(static_cast<uint32_t>(largest_bits));
  const float stored = largest < kSmallestStateScale ? 0.0F : largest;
  return largest_bits < 0x7f800000 ? stored : state_float(0x7fc00000U);
}

// What encode_code() multiplies by, or 0 where all codes of the block are zero. It is larger than
// kSquares / scale by 2^-23 of it, so that roundings do not bring the largest magnitude below its
// code.
template <bool kRoot>
ZERO_KERNELS_INLINE float inverse_state_scale(float scale) {
  constexpr float kAbove = StateCode<kRoot>::kSquares * (1.0F + 0x1p-23F);
  static_assert(kAbove > StateCode<kRoot>::kSquares);
  return scale > 0.0F ? kAbove / scale : 0.0F;
}

// The code of an average x in [-127, 127], or of a root in [0, 255]. With t = |x| * inverse and q
// the largest code below kTop with q^2 <= t, it is q + 1 where t - q^2 > u * (2q + 1), and else q:
// the mean over u in [0, 1) of its square is t, but for roots with t < 1, which have code 1.
// `inverse` is not 0. own_noise is 2^16 u; 0x8000 rounds to nearest.
template <bool kRoot>
ZERO_KERNELS_INLINE int32_t encode_code(float x, float inverse, uint32_t own_noise) {
  constexpr auto kLast = static_cast<int32_t>(StateCode<kRoot>::kTop) - 1;
  // A root has no sign, and may be infinite. Minima of integers, since g++ makes control flow of
  // those of floats here, and no vectors.
  const auto bits = static_cast<int32_t>(state_bits(x));
  const int32_t magnitude =
      kRoot ? (bits < kLargestRootBits ? bits : kLargestRootBits) : bits & 0x7fffffff;
  const float t = state_float(static_cast<uint32_t>(magnitude)) * inverse;
  const float s = square_root(t);
  const auto whole = static_cast<int32_t>(s);
  const int32_t below = whole < kLast ? whole : kLast;
  const auto q = static_cast<float>(below);
  // 2^-16 (2q + 1), in which nothing is rounded. A root above 0 has code 1 at least: a denominator
  // does not become 0 by rounding.
  const float width = q * 0x1p-15F + (kRoot && s < 1.0F ? 0.0F : 0x1p-16F);
  const auto noise = static_cast<float>(static_cast<int32_t>(own_noise));
  const int32_t code = below + (t - q * q > noise * width ? 1 : 0);
  return !kRoot && bits < 0 ? -code : code;
}

// The average or second moment of a code.
template <bool kRoot>
ZERO_KERNELS_INLINE float decode_code(int32_t code, float scale) {
  const auto q = static_cast<float>(code);
  const float square = q * (kRoot ? q : state_float(state_bits(q) & 0x7fffffffU));
  const float decoded = (square * StateCode<kRoot>::kUnit) * scale;
  return kRoot ? decoded * decoded : decoded;
}

// The upper 16 bits of x, rounded by the noise. Infinities stay, and a NaN becomes quiet.
ZERO_KERNELS_INLINE uint16_t encode_bfloat16_state(float x, uint32_t own_noise) {
  const uint32_t bits = state_bits(x);
  const uint32_t finite = bits + own_noise;
  const int32_t magnitude = magnitude_bits(x);
  const uint32_t special = magnitude > 0x7f800000 ? bits | 0x00400000U : bits;
  return static_cast<uint16_t>((magnitude >= 0x7f800000 ? special : finite) >> 16);
}

}  // namespace zero::kernels
