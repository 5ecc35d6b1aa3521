// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: masters and working values, eight at a time, for processors with AVX2 and without
// AVX-512: of their halves the compiler makes more instructions than of an update. Included once by
// range_kernels_impl.h, for each instruction set.
//
// P and W are as in range_masters.h.
#pragma once

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define ZERO_EIGHTS
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_masters.h"

namespace zero::kernels {
namespace {

// load_master() of eight values.
inline __m256 load_eight(const float* p, const void*) { return _mm256_loadu_ps(p); }
inline __m256 load_eight(const int16_t* p, const BFloat16* working) {
  const auto eight = [](const void* at) {
    return _mm_loadu_si128(static_cast<const __m128i*>(at));
  };
  const __m256i upper = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight(working)), 16);
  return _mm256_castsi256_ps(_mm256_add_epi32(upper, _mm256_cvtepi16_epi32(eight(p))));
}

// Numbers below 2^16.
inline void store_halves(__m256i a, __m256i b, void* to) {
  const __m256i packed = _mm256_packus_epi32(a, b);
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline __m256i upper_half(__m256i x) { return _mm256_srli_epi32(x, 16); }
inline __m256i lower_half(__m256i x) { return _mm256_blend_epi16(x, _mm256_setzero_si256(), 0xaa); }

inline __m256i rounded_to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

// store_master() of sixteen values, of which one is a NaN.
template <class P>
void store_with_nan(__m256 a, __m256 b, P* p, BFloat16* working) {
  float values[16];
  _mm256_storeu_ps(values, a);
  _mm256_storeu_ps(values + 8, b);
  for (int64_t i = 0; i < 16; ++i) store_master(values[i], p, working, i);
}
inline bool has_nan(__m256 a, __m256 b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}

// store_master() of sixteen values.
template <class W>
inline void store_sixteen(__m256 a, __m256 b, float* p, W* working) {
  _mm256_storeu_ps(p, a);
  _mm256_storeu_ps(p + 8, b);
  if constexpr (__is_same(W, BFloat16)) {
    store_halves(upper_half(rounded_to_bfloat16(a)), upper_half(rounded_to_bfloat16(b)), working);
    if (has_nan(a, b)) store_with_nan(a, b, p, working);
  } else if constexpr (!__is_same(W, NoWorking)) {
    narrow(p, working, 16);
  }
}
inline void store_sixteen(__m256 a, __m256 b, int16_t* p, BFloat16* working) {
  const __m256i a_bits = _mm256_castps_si256(a), b_bits = _mm256_castps_si256(b);
  const __m256i half = _mm256_set1_epi32(0x8000);
  store_halves(upper_half(_mm256_add_epi32(a_bits, half)),
               upper_half(_mm256_add_epi32(b_bits, half)), working);
  store_halves(lower_half(a_bits), lower_half(b_bits), p);
  if (has_nan(a, b)) store_with_nan(a, b, p, working);
}

}  // namespace
}  // namespace zero::kernels
#endif
