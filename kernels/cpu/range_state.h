// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of stored_state.h, and of updates whose state is not fp32. Included once
// by range_kernels_impl.h, for each instruction set.
//
// An update takes kStateBlock elements at a time: it decodes their state into buffers that stay in
// the L1 cache, runs a loop over them, and encodes the buffers.
//
// P and W are as in range_masters.h. M and V are what stored moments m and v are read through:
// CodeBlock or BFloat16Block. kRoot says that an array is of second moments, of which kInt8 stores
// the roots.
#pragma once

#include <cstdint>

#include "kernels/cpu/range_coded_adam.h"
#include "kernels/cpu/range_codes.h"
#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_lanes.h"
#include "kernels/cpu/range_types.h"
#include "kernels/cpu/range_update.h"
#include "kernels/detail/state_codes.h"
#include "kernels/detail/state_noise.h"

namespace zero::kernels {
namespace {

#ifdef ZERO_LANES
// encode_bfloat16_state() of finite values, with their 32 bits of noise.
template <bool kRoot>
inline Bits encode_bfloat16_lanes(Floats x, Bits noise) {
  return (bits_of(x) + (kRoot ? noise >> 16 : noise & 0xffffU)) >> 16;
}
// A number that is not finite makes a NaN.
inline Floats nan_unless_finite(Floats x) { return x - x; }
#endif

template <bool kRoot>
inline void encode_bfloat16s(const float* __restrict values, const BlockNoise noise, int64_t numel,
                             BFloat16* __restrict to) {
  const uint32_t* __restrict multiples = noise.multiples;
  int64_t i = 0;
#ifdef ZERO_LANES
  for (; i + 2 * kVectorLanes <= numel; i += 2 * kVectorLanes) {
    const auto a = load_lanes<Floats>(values + i);
    const auto b = load_lanes<Floats>(values + i + kVectorLanes);
    if (has_nan(nan_unless_finite(a), nan_unless_finite(b))) break;
    store_halves(encode_bfloat16_lanes<kRoot>(a, load_noise(noise, i)),
                 encode_bfloat16_lanes<kRoot>(b, load_noise(noise, i + kVectorLanes)), to + i);
  }
#endif
  for (; i < numel; ++i) {
    to[i].bits = encode_bfloat16_state(values[i], own_noise<kRoot>(noise.key + multiples[i]));
  }
}

// As CodeBlock.
struct BFloat16Block {
  float operator[](int64_t i) const { return widen_one(values[i]); }
  const BFloat16* values;
};

// Of the block that begins at element `begin` and has `count` elements. kRoot: of second moments,
// which encode_block() takes as their roots with kInt8.
template <bool kRoot>
inline void decode_block(StateType type, void* array, int64_t numel, int64_t begin, int64_t count,
                         float* __restrict values) {
  if (type == StateType::kInt8) {
    const CodeBlock<kRoot> from = Codes<kRoot>(array, numel).block(begin);
    for (int64_t i = 0; i < count; ++i) values[i] = from[i];
  } else {
    widen(static_cast<const BFloat16*>(array) + begin, values, count);
  }
}

template <bool kRoot>
inline void encode_block(StateType type, const float* values, const BlockNoise& noise,
                         int64_t count, void* array, int64_t numel, int64_t begin) {
  if (type == StateType::kInt8) {
    const Codes<kRoot> to(array, numel);
    encode_codes<kRoot>(values, noise, count, to.scales + begin / kStateBlock, to.codes + begin);
  } else {
    encode_bfloat16s<kRoot>(values, noise, count, static_cast<BFloat16*>(array) + begin);
  }
}

// Fetches what an update reads of the block after next behind that at `begin`, if it is whole. An
// encoding waits for no memory, and an update of that block then waits less.
template <class Segment>
inline void fetch_later_block(const Segment& s, int64_t begin, int64_t end) {
  if (begin + 3 * kStateBlock > end) return;
  for (int64_t i = begin + 2 * kStateBlock; i < begin + 3 * kStateBlock; i += 16) {  // 64 bytes
    if (s.master != nullptr) __builtin_prefetch(s.master + i);  // null where it is split
    __builtin_prefetch(s.gradient + i);
  }
}

// Calls update(begin, count, noise) for the blocks of elements [begin, end) of a segment.
template <class Segment, class Update>
inline void for_each_state_block(const Segment& segment, int64_t begin, int64_t end,
                                 const NoiseStep& step, const Update& update) {
  const NoiseSeed seed = noise_seed(step, segment.parameter);
  for (; begin < end; begin += kStateBlock) {
    const uint32_t key = noise_key(seed, segment.element + begin);
    update(begin, smaller(kStateBlock, end - begin), BlockNoise{key, kNoiseMultiples.of});
  }
}

// The new moments m, v, and the roots of v, of a block whose moments are stored.
template <bool kDecoupled, class M, class V, class P, class W>
void adam_moments_loop(const AdamCoefficients c, float gradient_coefficient, int64_t numel,
                       const M stored_m, const V stored_v, const P* __restrict p,
                       const W* __restrict working, const float* __restrict gradient,
                       float* __restrict m, float* __restrict v, float* __restrict roots) {
  for (int64_t i = 0; i < numel; ++i) {
    const float p_i = kDecoupled ? 0.0F : load_master(p, working, i);
    float m_i = stored_m[i];
    float v_i = stored_v[i];
    adam_moments<kDecoupled>(c, gradient[i] * gradient_coefficient, p_i, m_i, v_i);
    m[i] = m_i;
    v[i] = v_i;
    roots[i] = square_root(v_i);
  }
}

// The parameters of a block, from the new moments.
template <bool kAmsgrad, bool kDecoupled, class P, class W>
void adam_parameter_loop(const AdamCoefficients c, int64_t numel, const float* __restrict m,
                         const float* __restrict v, const float* __restrict roots,
                         float* __restrict max_v, P* __restrict p, W* __restrict working) {
  int64_t i = 0;
#ifdef ZERO_LANES
  for (; !kAmsgrad && i + 2 * kVectorLanes <= numel; i += 2 * kVectorLanes) {
    adam_parameter_lanes<kDecoupled>(c, m + i, roots + i, p + i, working_at(working, i));
  }
#endif
  for (; i < numel; ++i) {
    float p_i = load_master(p, working, i);
    float root = roots[i];
    if constexpr (kAmsgrad) {
      const float max_v_i = larger_moment(v[i], max_v[i]);
      max_v[i] = max_v_i;
      root = square_root(max_v_i);
    }
    adam_parameter<kDecoupled>(c, m[i], root, p_i);
    store_master(p_i, p, working, i);
  }
}

template <class P, class W>
inline auto adam_parameter_loop_of(const AdamCoefficients& c) {
  return c.amsgrad ? (c.decoupled ? adam_parameter_loop<true, true, P, W>
                                  : adam_parameter_loop<true, false, P, W>)
                   : (c.decoupled ? adam_parameter_loop<false, true, P, W>
                                  : adam_parameter_loop<false, false, P, W>);
}

// Two loops in place of adam_loop(): a processor runs more elements of a short loop at the same
// time, and roots that are made with the moments do not wait for the divisions.
void stored_adam_range(const AdamSegment& s, int64_t begin, int64_t end, const NoiseStep& step,
                       const AdamCoefficients& c, float gradient_coefficient,
                       ElementType working_type) {
  const bool int8 = s.state_type == StateType::kInt8;
  with_master(s, working_type, [&]<class P, class W>(P* p, W* working) {
    const auto parameter_loop = adam_parameter_loop_of<P, W>(c);
    alignas(64) float m[kStateBlock];
    alignas(64) float v[kStateBlock];
    alignas(64) float roots[kStateBlock];
    for_each_state_block(
        s, begin, end, step, [&](int64_t i, int64_t count, const BlockNoise& noise) {
#ifdef ZERO_LANES
          if (int8 && count == kStateBlock && !c.amsgrad &&
              coded_adam_block(s, i, end, noise, c, gradient_coefficient, p + i,
                               working_at(working, i))) {
            return;
          }
#endif
          const auto moments_loop = [&](const auto& stored_m, const auto& stored_v) {
            const auto loop = [&]<bool kDecoupled>() {
              adam_moments_loop<kDecoupled>(c, gradient_coefficient, count, stored_m, stored_v,
                                            p + i, working_at(working, i), s.gradient + i, m, v,
                                            roots);
            };
            c.decoupled ? loop.template operator()<true>() : loop.template operator()<false>();
          };
          int8 ? moments_loop(Codes<false>(s.exp_avg, s.numel).block(i),
                              Codes<true>(s.exp_avg_sq, s.numel).block(i))
               : moments_loop(BFloat16Block{static_cast<const BFloat16*>(s.exp_avg) + i},
                              BFloat16Block{static_cast<const BFloat16*>(s.exp_avg_sq) + i});
          fetch_later_block(s, i, end);
          encode_block<false>(s.state_type, m, noise, count, s.exp_avg, s.numel, i);
          parameter_loop(c, count, m, v, roots, c.amsgrad ? s.max_exp_avg_sq + i : nullptr, p + i,
                         working_at(working, i));
          encode_block<true>(s.state_type, int8 ? roots : v, noise, count, s.exp_avg_sq, s.numel,
                             i);
        });
  });
}

void stored_sgd_range(const SgdSegment& s, int64_t begin, int64_t end, const NoiseStep& step,
                      const SgdCoefficients& c, float gradient_coefficient,
                      ElementType working_type) {
  with_master(s, working_type, [&]<class P, class W>(P* p, W* working) {
    const auto loop = sgd_loop_of<P, W>(c, s.first_step);
    alignas(64) float b[kStateBlock];
    for_each_state_block(
        s, begin, end, step, [&](int64_t i, int64_t count, const BlockNoise& noise) {
          if (!s.first_step) decode_block<false>(s.state_type, s.momentum, s.numel, i, count, b);
          loop(c, gradient_coefficient, count, p + i, b, s.gradient + i, working_at(working, i));
          fetch_later_block(s, i, end);
          encode_block<false>(s.state_type, b, noise, count, s.momentum, s.numel, i);
        });
  });
}

void stored_lion_range(const LionSegment& s, int64_t begin, int64_t end, const NoiseStep& step,
                       const LionCoefficients& c, float gradient_coefficient,
                       ElementType working_type) {
  with_master(s, working_type, [&]<class P, class W>(P* p, W* working) {
    alignas(64) float m[kStateBlock];
    for_each_state_block(
        s, begin, end, step, [&](int64_t i, int64_t count, const BlockNoise& noise) {
          decode_block<false>(s.state_type, s.exp_avg, s.numel, i, count, m);
          lion_loop<P, W>(c, gradient_coefficient, count, p + i, m, s.gradient + i,
                          working_at(working, i));
          fetch_later_block(s, i, end);
          encode_block<false>(s.state_type, m, noise, count, s.exp_avg, s.numel, i);
        });
  });
}

// Blocks of elements [begin, end) of an array of `numel`, for StateType::kInt8.
void decode_codes_range(bool root, const void* array, int64_t numel, int64_t begin, int64_t end,
                        float* values) {
  for (; begin < end; begin += kStateBlock) {
    const int64_t count = smaller(kStateBlock, end - begin);
    root ? decode_block<true>(StateType::kInt8, const_cast<void*>(array), numel, begin, count,
                              values + begin)
         : decode_block<false>(StateType::kInt8, const_cast<void*>(array), numel, begin, count,
                               values + begin);
  }
}

void encode_codes_range(bool root, const float* values, int64_t numel, int64_t begin, int64_t end,
                        void* array) {
  alignas(64) float roots[kStateBlock];
  for (; begin < end; begin += kStateBlock) {
    const int64_t count = smaller(kStateBlock, end - begin);
    for (int64_t i = 0; root && i < count; ++i) {
      roots[i] = square_root(float_of(bits_of(values[begin + i]) & 0x7fffffffU));
    }
    root ? encode_block<true>(StateType::kInt8, roots, kNearest, count, array, numel, begin)
         : encode_block<false>(StateType::kInt8, values + begin, kNearest, count, array, numel,
                               begin);
  }
}

}  // namespace
}  // namespace zero::kernels
