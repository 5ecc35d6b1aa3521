// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: vectors of kVectorLanes elements, for loops of which the compiler makes more
// instructions than they need. Included once by range_kernels_impl.h, for each instruction set;
// what needs them is compiled where ZERO_LANES is defined. They round as the loops over single
// elements do.
//
// Arithmetic on them is written with operators. Conversions of integers are not: of those g++ 12
// makes one element at a time.
//
// P and W are as in range_masters.h.
#pragma once

#if defined(__AVX2__) && defined(__FMA__)
#define ZERO_LANES
#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_masters.h"

namespace zero::kernels {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorLanes = 16;
#else
constexpr int64_t kVectorLanes = 8;
#endif

using Floats [[gnu::vector_size(kVectorLanes * 4)]] = float;
using Ints [[gnu::vector_size(kVectorLanes * 4)]] = int32_t;
using Bits [[gnu::vector_size(kVectorLanes * 4)]] = uint32_t;

template <class Vector, class T>
inline Vector load_lanes(const T* from) {
  Vector x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
template <class Vector, class T>
inline void store_lanes(Vector x, T* to) {
  __builtin_memcpy(to, &x, sizeof(x));
}

inline Bits bits_of(Floats x) { return reinterpret_cast<Bits>(x); }
inline Floats floats_of(Bits bits) { return reinterpret_cast<Floats>(bits); }
inline Floats magnitude(Floats x) { return floats_of(bits_of(x) & 0x7fffffffU); }
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Bits larger(Bits a, Bits b) { return a > b ? a : b; }

// What has no operator, for AVX-512 and for AVX2:
//
//   load_numbers         numbers of 8 bits
//   load_halves          the bits of numbers of 16, those of the signed ones with their signs
//   store_halves         the elements of `a` and then of `b`, numbers below 2^16
//   store_lower_halves   their lower 16 bits
//   with_lower_halves    the upper 16 bits of `upper` and the lower ones of `lower`
//   fused                a * b + c, rounded once
//   inverse_roots        within 1.5 * 2^-12 of them; of a subnormal number it may be infinite
//   larger               b where one is a NaN
//   has_nan              whether one of them is a NaN
//   add_one_where_less   x, or x + 1 where a < b
//   largest_of           the largest element
#if defined(__AVX512F__)
using Register = __m512i;
inline __m128i bytes(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
inline __m256i halves(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline Ints load_numbers(const int8_t* p) { return Ints(_mm512_cvtepi8_epi32(bytes(p))); }
inline Ints load_numbers(const uint8_t* p) { return Ints(_mm512_cvtepu8_epi32(bytes(p))); }
inline Bits load_halves(const int16_t* p) { return Bits(_mm512_cvtepi16_epi32(halves(p))); }
inline Bits load_halves(const BFloat16* p) { return Bits(_mm512_cvtepu16_epi32(halves(p))); }
inline void store_halves(Bits a, Bits b, void* to) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(Register(a)));
  _mm256_storeu_si256(static_cast<__m256i*>(to) + 1, _mm512_cvtepi32_epi16(Register(b)));
}
inline void store_lower_halves(Bits a, Bits b, void* to) { store_halves(a, b, to); }
inline Bits with_lower_halves(Bits upper, Bits lower) {
  const Register mask = _mm512_set1_epi32(0xffff);
  return Bits(_mm512_ternarylogic_epi32(Register(upper), Register(lower), mask, 0xd8));
}
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats roots_of(Floats x) { return _mm512_sqrt_ps(x); }
inline Floats inverse_roots(Floats x) { return _mm512_rsqrt14_ps(x); }
inline Ints to_nearest(Floats x) { return Ints(_mm512_cvtps_epi32(x)); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline bool has_nan(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0; }
inline Ints add_one_where_less(Ints x, Floats a, Floats b) { return a < b ? x + 1 : x; }
inline uint32_t largest_of(Bits x) { return _mm512_reduce_max_epu32(Register(x)); }
#else
using Register = __m256i;
inline __m128i bytes(const void* from) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(from));
}
inline __m128i halves(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
inline Ints load_numbers(const int8_t* p) { return Ints(_mm256_cvtepi8_epi32(bytes(p))); }
inline Ints load_numbers(const uint8_t* p) { return Ints(_mm256_cvtepu8_epi32(bytes(p))); }
inline Bits load_halves(const int16_t* p) { return Bits(_mm256_cvtepi16_epi32(halves(p))); }
inline Bits load_halves(const BFloat16* p) { return Bits(_mm256_cvtepu16_epi32(halves(p))); }
inline void store_halves(Bits a, Bits b, void* to) {
  const Register packed = _mm256_packus_epi32(Register(a), Register(b));
  _mm256_storeu_si256(static_cast<Register*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline Bits with_lower_halves(Bits upper, Bits lower) {
  return Bits(_mm256_blend_epi16(Register(lower), Register(upper), 0xaa));
}
inline void store_lower_halves(Bits a, Bits b, void* to) {
  store_halves(with_lower_halves(Bits{}, a), with_lower_halves(Bits{}, b), to);
}
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats roots_of(Floats x) { return _mm256_sqrt_ps(x); }
inline Floats inverse_roots(Floats x) { return _mm256_rsqrt_ps(x); }
inline Ints to_nearest(Floats x) { return Ints(_mm256_cvtps_epi32(x)); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline bool has_nan(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}
inline Ints add_one_where_less(Ints x, Floats a, Floats b) { return x - (a < b); }
inline uint32_t largest_of(Bits x) {
  const auto all = Register(x);
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}
#endif

// load_master() of kVectorLanes values.
inline Floats load_masters(const float* p, const void*) { return load_lanes<Floats>(p); }
inline Floats load_masters(const int16_t* p, const BFloat16* working) {
  return floats_of((load_halves(working) << 16) + load_halves(p));
}

// nearest_bfloat16() of what is no NaN.
inline Bits rounded_to_bfloat16(Floats x) {
  const Bits bits = bits_of(x);
  return bits + 0x7fffU + ((bits >> 16) & 1U);
}

// store_master() of the values of two vectors, of which one is a NaN.
template <class P>
void store_with_nan(Floats a, Floats b, P* p, BFloat16* working) {
  float values[2 * kVectorLanes];
  store_lanes(a, values);
  store_lanes(b, values + kVectorLanes);
  for (int64_t i = 0; i < 2 * kVectorLanes; ++i) store_master(values[i], p, working, i);
}

// store_master() of the values of two vectors.
template <class W>
inline void store_masters(Floats a, Floats b, float* p, W* working) {
  store_lanes(a, p);
  store_lanes(b, p + kVectorLanes);
  if constexpr (__is_same(W, BFloat16)) {
    store_halves(rounded_to_bfloat16(a) >> 16, rounded_to_bfloat16(b) >> 16, working);
    if (has_nan(a, b)) store_with_nan(a, b, p, working);
  } else if constexpr (!__is_same(W, NoWorking)) {
    narrow(p, working, 2 * kVectorLanes);
  }
}
inline void store_masters(Floats a, Floats b, int16_t* p, BFloat16* working) {
  store_halves((bits_of(a) + 0x8000U) >> 16, (bits_of(b) + 0x8000U) >> 16, working);
  store_lower_halves(bits_of(a), bits_of(b), p);
  if (has_nan(a, b)) store_with_nan(a, b, p, working);
}

}  // namespace
}  // namespace zero::kernels
#endif
