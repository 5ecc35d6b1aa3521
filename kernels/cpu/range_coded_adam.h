// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: Adam over a whole block whose moments are codes. Included once by range_kernels_impl.h,
// for each instruction set. The bits are those of stored_adam_range().
//
// A block takes two loops of about as many instructions. The first makes the moments and finds the
// largest of each array, and the second, which knows the scales then, the parameters and the codes:
// an encoding has no division, so it runs beside those of a parameter.
//
// P and W are as in range_masters.h.
#pragma once

#include "kernels/cpu/range_lanes.h"

#ifdef ZERO_LANES
#include <cstdint>

#include "kernels/cpu/range_codes.h"
#include "kernels/cpu/range_masters.h"
#include "kernels/detail/state_codes.h"
#include "kernels/detail/update_rules.h"
#include "kernels/segments.h"

namespace zero::kernels {
namespace {

// The new moments of a block, or of the second ones their roots, and the scales of their codes.
// A root has no sign, but for those of a NaN, whose scale is a NaN too.
template <bool kDecayed, class P, class W>
inline void coded_moments(const AdamCoefficients c, float gradient_coefficient, const int8_t* m,
                          float m_scale, const uint8_t* v, float v_scale, const P* p,
                          const W* working, const float* gradient, float* __restrict averages,
                          float* __restrict roots, uint32_t* largest) {
  Bits largest_average{};
  Bits largest_root{};
  for (int64_t i = 0; i < kStateBlock; i += kVectorLanes) {
    const Floats q = to_floats(load_numbers(m + i));
    Floats average = q * magnitude(q) * StateCode<false>::kUnit * m_scale;
    const Floats r = to_floats(load_numbers(v + i));
    Floats root = r * r * StateCode<true>::kUnit * v_scale;
    Floats square = root * root;
    const Floats master = kDecayed ? load_masters(p + i, working_at(working, i)) : Floats{};
    adam_moments<!kDecayed>(c, load_lanes<Floats>(gradient + i) * gradient_coefficient, master,
                            average, square);
    store_lanes(average, averages + i);
    largest_average = larger(largest_average, bits_of(magnitude(average)));
    root = roots_of(square);
    store_lanes(root, roots + i);
    largest_root = larger(largest_root, bits_of(root));
  }
  largest[0] = largest_of(largest_average);
  largest[1] = largest_of(largest_root);
}

// The parameters of two vectors, from their new moments.
template <bool kDecoupled, class P, class W>
inline void adam_parameter_lanes(const AdamCoefficients& c, const float* m, const float* roots,
                                 P* p, W* working) {
  Floats values[2];
  for (int64_t k = 0; k < 2; ++k) {
    const int64_t at = kVectorLanes * k;
    values[k] = load_masters(p + at, working_at(working, at));
    adam_parameter<kDecoupled>(c, load_lanes<Floats>(m + at), load_lanes<Floats>(roots + at),
                               values[k]);
  }
  store_masters(values[0], values[1], p, working);
}

// The parameters and the codes of a block, whose scales are above 0. `ahead` is the distance of the
// elements to fetch.
template <bool kDecoupled, class P, class W>
inline void coded_parameters(const AdamCoefficients c, const float* averages, float m_scale,
                             const float* roots, float v_scale, const BlockNoise noise, P* p,
                             W* working, const float* gradient, int64_t ahead, int8_t* m,
                             uint8_t* v) {
  const float m_inverse = inverse_state_scale<false>(m_scale);
  const float v_inverse = inverse_state_scale<true>(v_scale);
  for (int64_t i = 0; i < kStateBlock; i += 32) {
    for (int64_t j = i; j < i + 32; j += 2 * kVectorLanes) {
      adam_parameter_lanes<kDecoupled>(c, averages + j, roots + j, p + j, working_at(working, j));
      for (int64_t k = j; k < j + 2 * kVectorLanes; k += 16) {
        __builtin_prefetch(gradient + k + ahead);
        if constexpr (__is_same(P, float)) __builtin_prefetch(p + k + ahead);
      }
    }
    encode_32<false>(averages + i, m_inverse, noise, i, m + i);
    encode_32<true>(roots + i, v_inverse, noise, i, v + i);
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
  const auto parameters =
      c.decoupled ? coded_parameters<true, P, W> : coded_parameters<false, P, W>;
  parameters(c, averages, m_scale, roots, v_scale, noise, p, working, s.gradient + begin,
             begin + 3 * kStateBlock <= end ? 2 * kStateBlock : 0, m.codes + begin,
             v.codes + begin);
  return true;
}

}  // namespace
}  // namespace zero::kernels
#endif
