// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops over the codes and the noise of a block of stored state. Included once by
// range_kernels_impl.h, for each instruction set.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/detail/state_codes.h"
#include "kernels/detail/state_noise.h"
#include "kernels/segments.h"

namespace zero::kernels {
namespace {

// Noise of the elements of a block: key + multiples[i] for element i. A table takes less time than
// products of 32 bits, of which AVX2 makes two instructions.
struct BlockNoise {
  uint32_t key;
  const uint32_t* multiples;  // [kStateBlock]
};

struct NoiseMultiples {
  uint32_t of[kStateBlock];
};

constexpr NoiseMultiples kNoiseMultiples = [] {
  NoiseMultiples multiples{};
  for (uint32_t i = 0; i < kStateBlock; ++i) multiples.of[i] = noise_of(0, i);
  return multiples;
}();

// Rounds codes to nearest, in both halves.
constexpr NoiseMultiples kNoMultiples{};
constexpr BlockNoise kNearest{0x80008000U, kNoMultiples.of};

template <bool kRoot>
struct CodeOf {
  using Type = int8_t;
};
template <>
struct CodeOf<true> {
  using Type = uint8_t;
};

// The elements of a block, by index: averages or second moments.
template <bool kRoot>
struct CodeBlock {
  float operator[](int64_t i) const { return decode_code<kRoot>(codes[i], scale); }
  const typename CodeOf<kRoot>::Type* codes;
  float scale;
};

// A state array of `numel` elements, with StateType::kInt8.
template <bool kRoot>
struct Codes {
  using Type = typename CodeOf<kRoot>::Type;
  Codes(void* array, int64_t numel)
      : scales(static_cast<float*>(array)),
        codes(reinterpret_cast<Type*>(scales + (numel + kStateBlock - 1) / kStateBlock)) {}
  CodeBlock<kRoot> block(int64_t begin) const {
    return {codes + begin, scales[begin / kStateBlock]};
  }
  float* scales;
  Type* codes;
};

#if defined(__AVX2__) && defined(__FMA__)
// The magnitudes of encode_code() for eight finite values, with their 32 bits of noise, and sums
// where it has a root; about 13 instructions. The code is `below` or one more, for
// below = floor(sqrt(t)), and one comparison tells which: t > below^2 + u * (2 below + 1). It gives
// the same code from any c that is the code or one less: for c = below - 1 it is true, since u < 1,
// and for c = below + 1 false. Such a c is sqrt(t) - u, rounded, even if the root is off by 0.3; by
// rsqrtps, within 1.5 * 2^-12 of it, it is off by less than 0.1. So the bits do not depend on the
// processor's rsqrtps.
//
// What is fused is exact, or only approximate anyway. Codes may be one above kTop, and of 0 they
// may be below 0: store_codes() saturates them.
//
// Here the comparison is c (c + 2u) - t < -u. The difference is exact where it decides: it is a
// multiple of 2^-23 if t is 1 or more, and else it is -t, or above 0.
inline __m256i encode_averages(__m256 x, __m256 inverse, __m256i noise) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const __m256 t = _mm256_mul_ps(_mm256_and_ps(x, magnitude), inverse);
  // The lower bits of 128 are units of 2^-16.
  const __m256 start = _mm256_set1_ps(128.0F);
  const __m256 minus_u = _mm256_sub_ps(
      start, _mm256_castsi256_ps(_mm256_blend_epi16(noise, _mm256_castps_si256(start), 0xaa)));
  // rsqrtps takes a subnormal number for 0, of which it makes infinity. The approximation may be of
  // 2^-126 then.
  const __m256 above_0 =
      _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x00800000)));
  const __m256i c = _mm256_cvtps_epi32(_mm256_fmadd_ps(above_0, _mm256_rsqrt_ps(above_0), minus_u));
  const __m256 q = _mm256_cvtepi32_ps(c);
  const __m256 sum = _mm256_fnmadd_ps(minus_u, _mm256_set1_ps(2.0F), q);
  const __m256 up = _mm256_cmp_ps(_mm256_fmsub_ps(q, sum, t), minus_u, _CMP_LT_OQ);
  return _mm256_sub_epi32(c, _mm256_castps_si256(up));
}

// Here a product of noise and width may have 25 bits, so it is rounded as in encode_code(). A root
// above 0 has code 1 at least. Of 0 all is a NaN up to c, which is INT_MIN then.
inline __m256i encode_roots(__m256 x, __m256 inverse, __m256i noise) {
  const __m256 t = _mm256_mul_ps(x, inverse);
  const __m256 u = _mm256_cvtepi32_ps(_mm256_srli_epi32(noise, 16));
  const __m256 unit = _mm256_set1_ps(0x1p-16F);
  const __m256 root = _mm256_fnmadd_ps(u, unit, _mm256_mul_ps(t, _mm256_rsqrt_ps(t)));
  // The second operand where one is a NaN.
  const __m256i c = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_set1_ps(1.0F), root));
  const __m256 q = _mm256_cvtepi32_ps(c);
  const __m256 width = _mm256_fmadd_ps(q, _mm256_set1_ps(0x1p-15F), unit);
  const __m256 up = _mm256_cmp_ps(_mm256_fnmadd_ps(q, q, t), _mm256_mul_ps(u, width), _CMP_GT_OQ);
  return _mm256_sub_epi32(c, _mm256_castps_si256(up));
}

// Writes the codes of 32 values: at most kTop, and with the signs of averages.
template <bool kRoot>
inline void store_codes(const __m256i* eights, const float* values, void* codes) {
  const auto packed = [](const __m256i* of, const auto& pack) {
    return pack(_mm256_packs_epi32(of[0], of[1]), _mm256_packs_epi32(of[2], of[3]));
  };
  __m256i bytes = packed(eights, [](auto a, auto b) { return _mm256_packus_epi16(a, b); });
  if constexpr (!kRoot) {
    __m256i x[4];
    for (int64_t k = 0; k < 4; ++k) x[k] = _mm256_castps_si256(_mm256_loadu_ps(values + 8 * k));
    const __m256i signs = packed(x, [](auto a, auto b) { return _mm256_packs_epi16(a, b); });
    bytes = _mm256_sign_epi8(_mm256_min_epu8(bytes, _mm256_set1_epi8(127)), signs);
  }
  // Each half of a vector was packed by itself.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(static_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
}
#endif

// `values` are averages or roots.
template <bool kRoot>
inline void encode_codes(const float* __restrict values, const BlockNoise noise, int64_t numel,
                         float* __restrict scale, typename CodeOf<kRoot>::Type* __restrict codes) {
  int32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t bits = magnitude_bits(values[i]);
    largest = largest < bits ? bits : largest;
  }
  const float s = state_scale<kRoot>(largest);
  *scale = s;
  // Not s == 0: the scale of a NaN is one.
  if (!(s > 0.0F)) {
    for (int64_t i = 0; i < numel; ++i) codes[i] = 0;
    return;
  }
  const float inverse = inverse_state_scale<kRoot>(s);
  const uint32_t* __restrict multiples = noise.multiples;
  int64_t i = 0;
#if defined(__AVX2__) && defined(__FMA__)
  const __m256i key = _mm256_set1_epi32(static_cast<int32_t>(noise.key));
  for (; largest < 0x7f800000 && i + 32 <= numel; i += 32) {
    __m256i eights[4];
    for (int64_t k = 0; k < 4; ++k) {
      const auto* const multiple = reinterpret_cast<const __m256i*>(multiples + i) + k;
      const __m256i own = _mm256_add_epi32(key, _mm256_loadu_si256(multiple));
      const __m256 x = _mm256_loadu_ps(values + i + 8 * k);
      eights[k] = kRoot ? encode_roots(x, _mm256_set1_ps(inverse), own)
                        : encode_averages(x, _mm256_set1_ps(inverse), own);
    }
    store_codes<kRoot>(eights, values + i, codes + i);
  }
#endif
  for (; i < numel; ++i) {
    codes[i] = static_cast<typename CodeOf<kRoot>::Type>(
        encode_code<kRoot>(values[i], inverse, own_noise<kRoot>(noise.key + multiples[i])));
  }
}

}  // namespace
}  // namespace zero::kernels
