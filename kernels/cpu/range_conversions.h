// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: conversions between fp32 and the 16-bit types over short ranges, for
// the CPU loops. Included once by each range_kernels_<isa>.cc, which is why
// everything here has internal linkage.
//
// Narrowing rounds to nearest, ties to even. NaN becomes quiet and keeps its
// sign and its upper payload bits: that is what the F16C instructions do, and
// the code for processors without them gives the same bits. (The AVX-512 forms
// of those are not used: no faster here, and g++ 12 warns inside its own header.)
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

namespace zero::kernels {
namespace {

// Memory holding the bits of the type; arithmetic is done on float alone.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float widen_one(BFloat16 x) { return float_of(uint32_t{x.bits} << 16); }

// The upper 16 bits are those of the nearest BFloat16.
inline uint32_t nearest_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
  const uint32_t quiet = bits | 0x00400000U;
  return x != x ? quiet : rounded;
}

inline BFloat16 narrow_one_bfloat16(float x) {
  return {static_cast<uint16_t>(nearest_bfloat16(x) >> 16)};
}

// fp16 has 5 exponent bits with bias 15 and 10 mantissa bits; fp32 has bias 127
// and 23 mantissa bits. So the mantissa moves by 13 and the exponent by 112.
inline float widen_one(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000U} << 16;
  const uint32_t rest = uint32_t{x.bits & 0x7fffU} << 13;
  const uint32_t normal = rest + (112U << 23);
  // Subnormal: 2^-14 + value is a normal float, from which 2^-14 is taken away exactly.
  const uint32_t subnormal = bits_of(float_of(rest + (113U << 23)) - float_of(113U << 23));
  const uint32_t special = rest | 0x7f800000U | (rest > 0x0f800000U ? 0x00400000U : 0U);
  const uint32_t finite = rest < 0x00800000U ? subnormal : normal;
  return float_of(sign | (rest >= 0x0f800000U ? special : finite));
}

inline Half narrow_one_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t normal = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  // The spacing of floats in [0.5, 1) is 2^-24, that of subnormal fp16: the addition rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5F) - 0x3f000000U;
  const uint32_t nan = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
  uint32_t result = magnitude < 0x38800000U ? subnormal : normal;  // below 2^-14
  result = magnitude >= 0x477ff000U ? 0x7c00U : result;            // 65520 rounds to infinity
  result = magnitude > 0x7f800000U ? nan : result;
  return {static_cast<uint16_t>(sign | result)};
}

// widen: destination[i] = float(source[i]). narrow: destination[i] = T(source[i]).
// The two ranges do not overlap.
inline void widen(const float* __restrict source, float* __restrict destination, int64_t numel) {
  __builtin_memcpy(destination, source, static_cast<size_t>(numel) * sizeof(float));
}

inline void widen(const BFloat16* __restrict source, float* __restrict destination, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    destination[i] = widen_one(source[i]);
  }
}

inline void widen(const Half* __restrict source, float* __restrict destination, int64_t numel) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= numel; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(destination + i, _mm256_cvtph_ps(half));
  }
#endif
  for (; i < numel; ++i) {
    destination[i] = widen_one(source[i]);
  }
}

inline void narrow(const float* __restrict source, float* __restrict destination, int64_t numel) {
  __builtin_memcpy(destination, source, static_cast<size_t>(numel) * sizeof(float));
}

inline void narrow(const float* __restrict source, BFloat16* __restrict destination,
                   int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    destination[i] = narrow_one_bfloat16(source[i]);
  }
}

inline void narrow(const float* __restrict source, Half* __restrict destination, int64_t numel) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= numel; i += 8) {
    const __m256 values = _mm256_loadu_ps(source + i);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i),
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < numel; ++i) {
    destination[i] = narrow_one_half(source[i]);
  }
}

}  // namespace
}  // namespace zero::kernels
