// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of stored_state.h, and of updates whose state is not fp32. Included once
// by range_kernels_impl.h, for each instruction set.
//
// An update takes kStateBlock elements at a time: it decodes their state into buffers that stay in
// the L1 cache, runs the loop of range_update.h over them, and encodes the buffers.
#pragma once

#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_types.h"
#include "kernels/cpu/range_update.h"
#include "kernels/detail/state_codes.h"
#include "kernels/detail/state_noise.h"

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

template <bool kRoot>
inline void decode_codes(const typename CodeOf<kRoot>::Type* __restrict codes, float scale,
                         int64_t numel, float* __restrict values) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = decode_code<kRoot>(codes[i], scale);
  }
}

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
  for (int64_t i = 0; i < numel; ++i) {
    codes[i] = static_cast<typename CodeOf<kRoot>::Type>(
        encode_code<kRoot>(values[i], inverse, own_noise<kRoot>(noise.key + multiples[i])));
  }
}

template <bool kRoot>
inline void encode_bfloat16s(const float* __restrict values, const BlockNoise noise, int64_t numel,
                             BFloat16* __restrict to) {
  const uint32_t* __restrict multiples = noise.multiples;
  for (int64_t i = 0; i < numel; ++i) {
    to[i].bits = encode_bfloat16_state(values[i], own_noise<kRoot>(noise.key + multiples[i]));
  }
}

// A state array of `numel` elements, with StateType::kInt8.
template <bool kRoot>
struct Codes {
  using Type = typename CodeOf<kRoot>::Type;
  Codes(void* array, int64_t numel)
      : scales(static_cast<float*>(array)),
        codes(reinterpret_cast<Type*>(scales + (numel + kStateBlock - 1) / kStateBlock)) {}
  float* scales;
  Type* codes;
};

// Of the block that begins at element `begin` and has `count` elements. kRoot: of second moments,
// which encode_block() takes as their roots with kInt8.
template <bool kRoot>
inline void decode_block(StateType type, void* array, int64_t numel, int64_t begin, int64_t count,
                         float* values) {
  if (type == StateType::kInt8) {
    const Codes<kRoot> from(array, numel);
    decode_codes<kRoot>(from.codes + begin, from.scales[begin / kStateBlock], count, values);
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

// Fetches what an update reads of the block behind that at `begin`, of which there are whole ones
// up to `end`. An encoding waits for no memory, and an update of the next block then waits less.
template <class Segment>
inline void fetch_next_block(const Segment& s, int64_t begin, int64_t end) {
  if (begin + 2 * kStateBlock > end) return;
  for (int64_t i = begin + kStateBlock; i < begin + 2 * kStateBlock; i += 16) {  // 64 bytes
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

template <class W>
inline W* working_at(W* working, int64_t begin) {
  return __is_same(W, NoWorking) ? nullptr : working + begin;
}

void stored_adam_range(const AdamSegment& s, int64_t begin, int64_t end, const NoiseStep& step,
                       const AdamCoefficients& c, float gradient_coefficient,
                       ElementType working_type) {
  with_master(s, working_type, [&]<class P, class W>(P* p, W* working) {
    const auto loop = s.state_type == StateType::kInt8 ? adam_loop_of<true, P, W>(c)
                                                       : adam_loop_of<false, P, W>(c);
    alignas(64) float m[kStateBlock];
    alignas(64) float v[kStateBlock];
    for_each_state_block(
        s, begin, end, step, [&](int64_t i, int64_t count, const BlockNoise& noise) {
          decode_block<false>(s.state_type, s.exp_avg, s.numel, i, count, m);
          decode_block<true>(s.state_type, s.exp_avg_sq, s.numel, i, count, v);
          loop(c, gradient_coefficient, count, p + i, m, v,
               c.amsgrad ? s.max_exp_avg_sq + i : nullptr, s.gradient + i, working_at(working, i));
          fetch_next_block(s, i, end);
          encode_block<false>(s.state_type, m, noise, count, s.exp_avg, s.numel, i);
          encode_block<true>(s.state_type, v, noise, count, s.exp_avg_sq, s.numel, i);
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
          fetch_next_block(s, i, end);
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
          fetch_next_block(s, i, end);
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
