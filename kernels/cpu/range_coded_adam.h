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
// P and W are as in range_masters.h.
#pragma once

#include "kernels/cpu/range_eights.h"

#ifdef ZERO_EIGHTS
#include <cstdint>

#include "kernels/cpu/range_codes.h"
#include "kernels/cpu/range_masters.h"
#include "kernels/detail/state_codes.h"
#include "kernels/detail/update_rules.h"
#include "kernels/segments.h"

namespace zero::kernels {
namespace {

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
    const __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes_at(m + i)));
    __m256 average = _mm256_mul_ps(q, _mm256_and_ps(q, magnitude));
    average = _mm256_mul_ps(average, _mm256_set1_ps(StateCode<false>::kUnit));
    average = _mm256_mul_ps(average, _mm256_set1_ps(m_scale));
    const __m256 r = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes_at(v + i)));
    __m256 root = _mm256_mul_ps(_mm256_mul_ps(r, r), _mm256_set1_ps(StateCode<true>::kUnit));
    root = _mm256_mul_ps(root, _mm256_set1_ps(v_scale));
    __m256 square = _mm256_mul_ps(root, root);

    const __m256 master =
        kDecayed ? load_eight(p + i, working_at(working, i)) : _mm256_setzero_ps();
    adam_moments<!kDecayed>(c, _mm256_loadu_ps(gradient + i) * gradient_coefficient, master,
                            average, square);
    _mm256_store_ps(averages + i, average);
    largest_average =
        _mm256_max_epu32(largest_average, _mm256_castps_si256(_mm256_and_ps(average, magnitude)));
    root = _mm256_sqrt_ps(square);
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
  const float decay = c.decoupled ? c.decay : 1.0F;
  const __m256 m_inverse = _mm256_set1_ps(inverse_state_scale<false>(m_scale));
  const __m256 v_inverse = _mm256_set1_ps(inverse_state_scale<true>(v_scale));
  const __m256i key = _mm256_set1_epi32(static_cast<int32_t>(noise.key));
  for (int64_t i = 0; i < kStateBlock; i += 32) {
    for (int64_t j = i; j < i + 32; j += 16) {
      __m256 values[2];
      for (int64_t k = 0; k < 2; ++k) {
        const int64_t at = j + 8 * k;
        values[k] = load_eight(p + at, working_at(working, at)) * decay;
        adam_parameter<false>(c, _mm256_load_ps(averages + at), _mm256_load_ps(roots + at),
                              values[k]);
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
