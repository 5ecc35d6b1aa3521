// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops over the codes and the noise of a block of stored state. Included once by
// range_kernels_impl.h, for each instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_lanes.h"
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

#ifdef ZERO_LANES
inline Bits load_noise(const BlockNoise& noise, int64_t begin) {
  return load_lanes<Bits>(noise.multiples + begin) + noise.key;
}

// The magnitudes of encode_code() for kVectorLanes finite values, with their 32 bits of noise, and
// sums where it has a root; about 13 instructions. The code is `below` or one more, for below =
// floor(sqrt(t)), and one comparison tells which: t > below^2 + u * (2 below + 1). It gives the
// same code from any c that is the code or one less: for c = below - 1 it is true, since u < 1, and
// for c = below + 1 false. Such a c is sqrt(t) - u, rounded, even if the root is off by 0.3; by
// inverse_roots(), within 1.5 * 2^-12 of it, it is off by less than 0.1. So the bits do not depend
// on the processor's approximation.
//
// What is fused is exact, or only approximate anyway. Codes may be one above kTop, and of 0 they
// may be below 0: store_codes() saturates them.
//
// Here the comparison is c (c + 2u) - t < -u. The difference is exact where it decides: it is a
// multiple of 2^-23 if t is 1 or more, and else it is -t, or above 0.
inline Ints encode_averages(Floats x, float inverse, Bits noise) {
  const Floats t = magnitude(x) * inverse;
  // The lower bits of 128 are units of 2^-16.
  const Floats minus_u = 128.0F - floats_of(with_lower_halves(bits_of(Floats{} + 128.0F), noise));
  // A subnormal number may count as 0, whose inverse root is infinite. The approximation may be of
  // 2^-126 then.
  const Floats above_0 = floats_of(larger(bits_of(t), Bits{} + 0x00800000U));
  const Ints c = to_nearest(fused(above_0, inverse_roots(above_0), minus_u));
  const Floats q = to_floats(c);
  const Floats sum = fused(minus_u, Floats{} - 2.0F, q);
  return add_one_where_less(c, fused(q, sum, -t), minus_u);
}

// Here a product of noise and width may have 25 bits, so it is rounded as in encode_code(). A root
// above 0 has code 1 at least. Of 0 all is a NaN up to c, which is INT_MIN then.
inline Ints encode_roots(Floats x, float inverse, Bits noise) {
  const Floats t = x * inverse;
  const Floats u = to_floats(Ints(noise >> 16));
  const Floats unit = Floats{} + 0x1p-16F;
  const Floats root = fused(u, -unit, t * inverse_roots(t));
  const Ints c = to_nearest(larger(Floats{} + 1.0F, root));
  const Floats q = to_floats(c);
  const Floats width = fused(q, Floats{} + 0x1p-15F, unit);
  return add_one_where_less(c, u * width, fused(-q, q, t));
}

// Writes the codes of 32 values: at most kTop, and with the signs of averages.
template <bool kRoot>
inline void store_codes(const Ints* lanes, const float* values, void* codes) {
#if defined(__AVX512F__)
  for (int64_t k = 0; k < 2; ++k) {
    Ints code = lanes[k] > 0 ? lanes[k] : Ints{};
    if constexpr (!kRoot) {
      code = code < 127 ? code : Ints{} + 127;
      code = load_lanes<Ints>(values + k * kVectorLanes) < 0 ? -code : code;
    }
    const auto all = Register(code);
    _mm_storeu_si128(static_cast<__m128i*>(codes) + k,
                     kRoot ? _mm512_cvtusepi32_epi8(all) : _mm512_cvtepi32_epi8(all));
  }
#else
  const auto packed = [](const Ints* of, const auto& pack) {
    return pack(_mm256_packs_epi32(Register(of[0]), Register(of[1])),
                _mm256_packs_epi32(Register(of[2]), Register(of[3])));
  };
  __m256i bytes = packed(lanes, [](auto a, auto b) { return _mm256_packus_epi16(a, b); });
  if constexpr (!kRoot) {
    Ints x[4];
    for (int64_t k = 0; k < 4; ++k) x[k] = load_lanes<Ints>(values + 8 * k);
    const __m256i signs = packed(x, [](auto a, auto b) { return _mm256_packs_epi16(a, b); });
    bytes = _mm256_sign_epi8(_mm256_min_epu8(bytes, _mm256_set1_epi8(127)), signs);
  }
  // Each half of a vector was packed by itself.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(static_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
#endif
}

// The same of 32 finite values, whose numbers in their block begin at `begin`.
template <bool kRoot>
inline void encode_32(const float* values, float inverse, const BlockNoise& noise, int64_t begin,
                      void* codes) {
  Ints lanes[32 / kVectorLanes];
  for (int64_t k = 0; k < 32 / kVectorLanes; ++k) {
    const int64_t at = k * kVectorLanes;
    const Floats x = load_lanes<Floats>(values + at);
    const Bits own = load_noise(noise, begin + at);
    lanes[k] = kRoot ? encode_roots(x, inverse, own) : encode_averages(x, inverse, own);
  }
  store_codes<kRoot>(lanes, values, codes);
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
#ifdef ZERO_LANES
  for (; largest < 0x7f800000 && i + 32 <= numel; i += 32) {
    encode_32<kRoot>(values + i, inverse, noise, i, codes + i);
  }
#endif
  for (; i < numel; ++i) {
    codes[i] = static_cast<typename CodeOf<kRoot>::Type>(
        encode_code<kRoot>(values[i], inverse, own_noise<kRoot>(noise.key + multiples[i])));
  }
}

}  // namespace
}  // namespace zero::kernels
