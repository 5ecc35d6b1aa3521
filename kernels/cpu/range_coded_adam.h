// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: Adam over a whole block whose moments are codes, for processors with AVX2 and without
// AVX-512, where the compiler's loops over twice the width are faster. Included once by
// range_kernels_impl.h, for each instruction set. The bits are those of stored_adam_range().
//
// A block takes two loops of about as many instructions. The first makes the moments and finds the
// largest of each array, and the second, which knows the scales then, the parameters and the codes:
// an encoding has no division, so it runs beside those of a parameter.
//
// P and W are as in range_update.h.
#pragma once

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define ZERO_CODED_ADAM_BLOCK
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/range_codes.h"
#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_update.h"
#include "kernels/detail/state_codes.h"
#include "kernels/segments.h"

namespace zero::kernels {
namespace {

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

// store_master() of 16 values. Whether one of them is a NaN is not looked at here.
inline __m256i rounded_to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}
template <class W>
inline void store_sixteen(__m256 a, __m256 b, float* p, W* working) {
  _mm256_storeu_ps(p, a);
  _mm256_storeu_ps(p + 8, b);
  if constexpr (__is_same(W, BFloat16)) {
    store_halves(upper_half(rounded_to_bfloat16(a)), upper_half(rounded_to_bfloat16(b)), working);
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
}

inline uint32_t largest_of(__m256i x) {
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}

// The new moments of a block, or of the second ones their roots, and the scales of their codes.
// A root has no sign, but for those of a NaN, whose scale is a NaN too.
template <bool kDecayed, class P, class W>
inline void coded_moments(const AdamCoefficients c, float gradient_coefficient, const int8_t* m,
                          float m_scale, const uint8_t* v, float v_scale, const P* p,
                          const W* working, const float* gradient, float* __restrict averages,
                          float* __restrict roots, uint32_t* largest) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  const auto codes_at = [](const void* at) {
    return _mm_loadl_epi64(static_cast<const __m128i*>(at));
  };
  __m256i largest_average = _mm256_setzero_si256();
  __m256i largest_root = _mm256_setzero_si256();
  for (int64_t i = 0; i < kStateBlock; i += 8) {
    __m256 g = _mm256_mul_ps(_mm256_loadu_ps(gradient + i), _mm256_set1_ps(gradient_coefficient));
    if constexpr (kDecayed) {
      g = _mm256_add_ps(g, _mm256_mul_ps(_mm256_set1_ps(c.weight_decay),
                                         load_eight(p + i, working_at(working, i))));
    }
    const __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes_at(m + i)));
    __m256 average = _mm256_mul_ps(q, _mm256_and_ps(q, magnitude));
    average = _mm256_mul_ps(average, _mm256_set1_ps(StateCode<false>::kUnit));
    average = _mm256_mul_ps(average, _mm256_set1_ps(m_scale));
    average = _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(c.beta1), average),
                            _mm256_mul_ps(_mm256_set1_ps(c.one_minus_beta1), g));
    _mm256_store_ps(averages + i, average);
    largest_average =
        _mm256_max_epu32(largest_average, _mm256_castps_si256(_mm256_and_ps(average, magnitude)));

    const __m256 r = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes_at(v + i)));
    __m256 root = _mm256_mul_ps(_mm256_mul_ps(r, r), _mm256_set1_ps(StateCode<true>::kUnit));
    root = _mm256_mul_ps(root, _mm256_set1_ps(v_scale));
    const __m256 square = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(c.one_minus_beta2), g), g);
    root = _mm256_sqrt_ps(
        _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(c.beta2), _mm256_mul_ps(root, root)), square));
    _mm256_store_ps(roots + i, root);
    largest_root = _mm256_max_epu32(largest_root, _mm256_castps_si256(root));
  }
  largest[0] = largest_of(largest_average);
  largest[1] = largest_of(largest_root);
}

// The parameters and the codes of a block, whose scales are above 0. `ahead` is the distance of the
// elements to fetch, those of the next block.
template <class P, class W>
inline void coded_parameters(const AdamCoefficients c, const float* averages, float m_scale,
                             const float* roots, float v_scale, const BlockNoise noise, P* p,
                             W* working, const float* gradient, int64_t ahead, int8_t* m,
                             uint8_t* v) {
  const __m256 decay = _mm256_set1_ps(c.decoupled ? c.decay : 1.0F);
  const __m256 m_inverse = _mm256_set1_ps(inverse_state_scale<false>(m_scale));
  const __m256 v_inverse = _mm256_set1_ps(inverse_state_scale<true>(v_scale));
  const __m256i key = _mm256_set1_epi32(static_cast<int32_t>(noise.key));
  __m256 zero = _mm256_setzero_ps();  // until a parameter is not finite
  for (int64_t i = 0; i < kStateBlock; i += 32) {
    for (int64_t j = i; j < i + 32; j += 16) {
      __m256 values[2];
      for (int64_t k = 0; k < 2; ++k) {
        const int64_t at = j + 8 * k;
        const __m256 denominator = _mm256_add_ps(
            _mm256_div_ps(_mm256_load_ps(roots + at), _mm256_set1_ps(c.sqrt_bias_correction2)),
            _mm256_set1_ps(c.eps));
        const __m256 step = _mm256_div_ps(
            _mm256_mul_ps(_mm256_set1_ps(c.negative_step_size), _mm256_load_ps(averages + at)),
            denominator);
        values[k] =
            _mm256_add_ps(_mm256_mul_ps(load_eight(p + at, working_at(working, at)), decay), step);
        if constexpr (__is_same(W, BFloat16)) {
          zero = _mm256_fmadd_ps(values[k], _mm256_setzero_ps(), zero);
        }
      }
      store_sixteen(values[0], values[1], p + j, working_at(working, j));
      __builtin_prefetch(gradient + j + ahead);
      if constexpr (__is_same(P, float)) __builtin_prefetch(p + j + ahead);
    }
    __m256i average_codes[4], root_codes[4];
    for (int64_t k = 0; k < 4; ++k) {
      const int64_t at = i + 8 * k;
      const __m256i u = _mm256_add_epi32(
          key, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(noise.multiples + at)));
      average_codes[k] = encode_averages(_mm256_load_ps(averages + at), m_inverse, u);
      root_codes[k] = encode_roots(_mm256_load_ps(roots + at), v_inverse, u);
    }
    store_codes<false>(average_codes, averages + i, m + i);
    store_codes<true>(root_codes, roots + i, v + i);
  }
  if (_mm256_movemask_ps(_mm256_cmp_ps(zero, zero, _CMP_UNORD_Q)) != 0) {
    for (int64_t i = 0; i < kStateBlock; ++i) {
      store_master(load_master(p, working, i), p, working, i);
    }
  }
}

// Whether the block that begins at element `begin` was updated: not where its moments are not
// finite. The buffers stay in the L1 cache.
template <class P, class W>
inline bool coded_adam_block(const AdamSegment& s, int64_t begin, int64_t end,
                             const BlockNoise& noise, const AdamCoefficients& c,
                             float gradient_coefficient, P* p, W* working) {
  const Codes<false> m(s.exp_avg, s.numel);
  const Codes<true> v(s.exp_avg_sq, s.numel);
  float& m_scale = m.scales[begin / kStateBlock];
  float& v_scale = v.scales[begin / kStateBlock];
  alignas(64) float averages[kStateBlock];
  alignas(64) float roots[kStateBlock];
  uint32_t largest[2];
  const auto moments = c.decoupled || c.weight_decay == 0.0F ? coded_moments<false, P, W>
                                                             : coded_moments<true, P, W>;
  moments(c, gradient_coefficient, m.codes + begin, m_scale, v.codes + begin, v_scale, p, working,
          s.gradient + begin, averages, roots, largest);
  if (largest[0] >= 0x7f800000U || largest[1] >= 0x7f800000U) return false;
  m_scale = state_scale<false>(static_cast<int32_t>(largest[0]));
  v_scale = state_scale<true>(static_cast<int32_t>(largest[1]));
  coded_parameters(c, averages, m_scale, roots, v_scale, noise, p, working, s.gradient + begin,
                   begin + 2 * kStateBlock <= end ? kStateBlock : 0, m.codes + begin,
                   v.codes + begin);
  return true;
}

}  // namespace
}  // namespace zero::kernels
#endif
