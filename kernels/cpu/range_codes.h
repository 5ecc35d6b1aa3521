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

#if defined(__AVX2__) && defined(__FMA__)
// encode_code() of eight values, with their 32 bits of noise, and sums where it has a root; about
// 20 instructions and not 26. The code is `below` or one more, for below = floor(sqrt(t)), and one
// comparison tells which: t > below^2 + u * (2 below + 1). It gives the same code from any c that
// is the code or one less: for c = below - 1 it is true, since u < 1, and for c = below + 1 false.
// Such a c is floor(sqrt(t) + 1/4 - u), even if the root is off by 0.1; by rsqrtps, within
// 1.5 * 2^-12 of it, it is off by less. So the bits do not depend on the processor's rsqrtps.
//
// What is fused is exact, or only approximate anyway. Codes may be one above kTop: store_codes()
// saturates them.
template <bool kRoot>
inline __m256i encode_eight(__m256i x, __m256 inverse, __m256i noise) {
  const __m256i magnitude = kRoot ? _mm256_min_epi32(x, _mm256_set1_epi32(kLargestRootBits))
                                  : _mm256_and_si256(x, _mm256_set1_epi32(0x7fffffff));
  const __m256 t = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), inverse);
  __m256 u = _mm256_cvtepi32_ps(kRoot ? _mm256_srli_epi32(noise, 16)
                                      : _mm256_and_si256(noise, _mm256_set1_epi32(0xffff)));
  // rsqrtps takes a subnormal number for 0, of which it makes infinity. The approximation may be of
  // 2^-126 then.
  const __m256 above_0 =
      _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x00800000)));
  const __m256 root = _mm256_fmadd_ps(above_0, _mm256_rsqrt_ps(above_0), _mm256_set1_ps(0.25F));
  const __m256 unit = _mm256_set1_ps(0x1p-16F);
  const __m256i c = _mm256_cvttps_epi32(_mm256_fnmadd_ps(u, unit, root));
  const __m256 q = _mm256_cvtepi32_ps(c);
  // A root above 0 has code 1 at least, so the noise of code 0 is 0.
  if (kRoot) u = _mm256_castsi256_ps(_mm256_sign_epi32(_mm256_castps_si256(u), c));
  const __m256 width = _mm256_fmadd_ps(q, _mm256_set1_ps(0x1p-15F), unit);
  const __m256 up = _mm256_cmp_ps(_mm256_fnmadd_ps(q, q, t), _mm256_mul_ps(u, width), _CMP_GT_OQ);
  const __m256i code = _mm256_sub_epi32(c, _mm256_castps_si256(up));
  return kRoot ? code : _mm256_sign_epi32(code, x);  // 0 where x is 0; code 0 where it is -0
}

// Writes the codes of four calls, at most kTop and, with a sign, at least -kTop.
template <bool kRoot>
inline void store_codes(const __m256i* eights, void* codes) {
  const __m256i first = _mm256_packs_epi32(eights[0], eights[1]);
  const __m256i last = _mm256_packs_epi32(eights[2], eights[3]);
  const __m256i packed =
      kRoot ? _mm256_packus_epi16(first, last)
            : _mm256_max_epi8(_mm256_packs_epi16(first, last), _mm256_set1_epi8(-127));
  // Each half of a vector was packed by itself.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(static_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(packed, order));
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
  for (; i + 32 <= numel; i += 32) {
    __m256i eights[4];
    for (int64_t k = 0; k < 4; ++k) {
      const auto* const at = reinterpret_cast<const __m256i*>(values + i) + k;
      const auto* const multiple = reinterpret_cast<const __m256i*>(multiples + i) + k;
      eights[k] = encode_eight<kRoot>(_mm256_loadu_si256(at), _mm256_set1_ps(inverse),
                                      _mm256_add_epi32(key, _mm256_loadu_si256(multiple)));
    }
    store_codes<kRoot>(eights, codes + i);
  }
#endif
  for (; i < numel; ++i) {
    codes[i] = static_cast<typename CodeOf<kRoot>::Type>(
        encode_code<kRoot>(values[i], inverse, own_noise<kRoot>(noise.key + multiples[i])));
  }
}

}  // namespace
}  // namespace zero::kernels
