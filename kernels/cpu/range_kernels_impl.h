// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops behind RangeKernels. Included once by each
// range_kernels_<isa>.cc; everything has internal linkage (see range_kernels.h).
//
// The loops are plain and left to the compiler to vectorise. Where a type has to
// be converted they work in chunks that stay in the L1 cache, so that memory is
// still read and written once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/range_block_int8.h"
#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"

namespace zero::kernels {
namespace {

// Elements of a chunk: two buffers of 4 KiB leave most of the L1 cache to the data.
constexpr int64_t kChunk = 1024;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls f with a null pointer of the C++ type for `type`.
template <class F>
inline void with_type(ElementType type, const F& f) {
  switch (type) {
    case ElementType::kFloat:
      return f(static_cast<float*>(nullptr));
    case ElementType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case ElementType::kHalf:
      return f(static_cast<Half*>(nullptr));
  }
}

// ---- cast ----

inline void cast_range(const float* source, float* destination, int64_t numel) {
  __builtin_memmove(destination, source, static_cast<size_t>(numel) * sizeof(float));
}
inline void cast_range(const BFloat16* source, BFloat16* destination, int64_t numel) {
  __builtin_memmove(destination, source, static_cast<size_t>(numel) * sizeof(BFloat16));
}
inline void cast_range(const Half* source, Half* destination, int64_t numel) {
  __builtin_memmove(destination, source, static_cast<size_t>(numel) * sizeof(Half));
}
template <class T>
inline void cast_range(const T* source, float* destination, int64_t numel) {
  widen(source, destination, numel);
}
template <class T>
inline void cast_range(const float* source, T* destination, int64_t numel) {
  narrow(source, destination, numel);
}
template <class S, class D>
inline void cast_range(const S* source, D* destination, int64_t numel) {
  float chunk[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, numel - begin);
    widen(source + begin, chunk, n);
    narrow(chunk, destination + begin, n);
  }
}

// The addend, or the source, may be the destination: hence the chunks.
inline void add_range(const float* source, const float* addend, float* destination, int64_t numel) {
  float sum[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, numel - begin);
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = addend[begin + i] + source[begin + i];
    }
    cast_range(sum, destination + begin, n);
  }
}
template <class S, class D>
inline void add_range(const S* source, const D* addend, D* destination, int64_t numel) {
  float added[kChunk];
  float sum[kChunk];
  for (int64_t begin = 0; begin < numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, numel - begin);
    widen(source + begin, added, n);
    widen(addend + begin, sum, n);
    for (int64_t i = 0; i < n; ++i) {
      sum[i] = sum[i] + added[i];
    }
    narrow(sum, destination + begin, n);
  }
}

void cast_copy_range(const void* source, ElementType source_type, void* destination,
                     ElementType destination_type, int64_t numel, const void* addend) {
  with_type(source_type, [&]<class S>(S*) {
    with_type(destination_type, [&]<class D>(D*) {
      const S* from = static_cast<const S*>(source);
      D* to = static_cast<D*>(destination);
      addend != nullptr ? add_range(from, static_cast<const D*>(addend), to, numel)
                        : cast_range(from, to, numel);
    });
  });
}

// ---- sum of rows ----

inline float widen_one(float x) { return x; }

template <class T>
inline void add_row(float* __restrict sum, const T* __restrict row, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    sum[i] = sum[i] + widen_one(row[i]);
  }
}

// shard (+)= factor * (before + last), in one loop: the conversion, the last
// addition and the product ride on the memory traffic of the last row.
template <bool kAccumulate, class S, class T>
void finish_rows(float factor, int64_t numel, const S* __restrict before, const T* __restrict last,
                 float* __restrict shard) {
  for (int64_t i = 0; i < numel; ++i) {
    const float product = factor * (widen_one(before[i]) + widen_one(last[i]));
    shard[i] = kAccumulate ? shard[i] + product : product;
  }
}

// One row has nothing to be added to, and may be the shard itself: hence the chunk.
template <class T>
inline void scale_row(const T* row, const SumRowsRange& range) {
  const float factor = range.factor;
  float chunk[kChunk];
  for (int64_t begin = 0; begin < range.numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, range.numel - begin);
    widen(row + begin, chunk, n);
    float* __restrict shard = range.shard + begin;
    for (int64_t i = 0; i < n; ++i) {
      const float product = factor * chunk[i];
      shard[i] = range.accumulate ? shard[i] + product : product;
    }
  }
}

template <class T>
inline void sum_rows_of(const SumRowsRange& range) {
  const auto row = [&](int64_t r) {
    if (range.rows != nullptr) return static_cast<const T*>(range.rows[r]) + range.begin;
    return r == range.own_rank ? static_cast<const T*>(range.own)
                               : static_cast<const T*>(range.received) + r * range.row_stride;
  };
  const int64_t last = range.world_size - 1;
  if (last == 0) {
    return scale_row(row(0), range);
  }
  if (last == 1) {
    const auto finish = range.accumulate ? finish_rows<true, T, T> : finish_rows<false, T, T>;
    return finish(range.factor, range.numel, row(0), row(1), range.shard);
  }
  const auto finish = range.accumulate ? finish_rows<true, float, T> : finish_rows<false, float, T>;
  float sum[kChunk];
  for (int64_t begin = 0; begin < range.numel; begin += kChunk) {
    const int64_t n = smaller(kChunk, range.numel - begin);
    widen(row(0) + begin, sum, n);
    for (int64_t r = 1; r < last; ++r) {
      add_row(sum, row(r) + begin, n);
    }
    finish(range.factor, n, sum, row(last) + begin, range.shard + begin);
  }
}

void sum_rows_range(const SumRowsRange& range) {
  with_type(range.type, [&]<class T>(T*) { sum_rows_of<T>(range); });
}

// ---- norms ----

// Element i goes into sum i % 32, in every instruction set, and the 32 sums are
// added up in one fixed order. How many of them make a vector is a matter of speed
// alone. So is fusing the square with the addition: a square is exact in double
// (24 + 24 bits fit into 53), and the sum is rounded once either way. Four lanes
// with AVX-512 too: on Zen 4 they are 1.6 times faster than eight.
constexpr int64_t kSums = 32;
#if defined(__FMA__)
constexpr int64_t kLanes = 4;
using Lanes = __m256d;
inline Lanes load_lanes(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
inline Lanes add_square(Lanes sum, Lanes x) { return _mm256_fmadd_pd(x, x, sum); }
#else
constexpr int64_t kLanes = 2;
using Lanes = double __attribute__((vector_size(16)));
inline Lanes load_lanes(const float* x) { return Lanes{x[0], x[1]}; }
inline Lanes add_square(Lanes sum, Lanes x) { return sum + x * x; }
#endif

enum class Power { kAbs, kSquare };

template <Power kPower>
inline double sum_of(const float* values, int64_t numel) {
  Lanes vectors[kSums / kLanes] = {};
  int64_t i = 0;
  for (; i + kSums <= numel; i += kSums) {
    for (int64_t v = 0; v < kSums / kLanes; ++v) {
      const Lanes x = load_lanes(values + i + v * kLanes);
      if constexpr (kPower == Power::kSquare) {
        vectors[v] = add_square(vectors[v], x);
      } else {
        vectors[v] += x < 0.0 ? -x : x;
      }
    }
  }
  double sums[kSums];
  __builtin_memcpy(sums, vectors, sizeof(sums));
  for (; i < numel; ++i) {
    const double x = values[i];
    sums[i % kSums] += kPower == Power::kSquare ? x * x : (x < 0.0 ? -x : x);
  }
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) {
      sums[j] += sums[j + half];
    }
  }
  return sums[0];
}

double sum_of_squares_range(const float* values, int64_t numel) {
  return sum_of<Power::kSquare>(values, numel);
}

double sum_of_abs_range(const float* values, int64_t numel) {
  return sum_of<Power::kAbs>(values, numel);
}

int64_t count_nonfinite_range(const float* values, int64_t numel) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) {
    count += (bits_of(values[i]) & 0x7fffffffU) >= 0x7f800000U ? 1 : 0;
  }
  return count;
}

int32_t max_abs_bits_range(const float* values, int64_t numel) {
  int32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t bits = static_cast<int32_t>(bits_of(values[i]) & 0x7fffffffU);
    largest = largest < bits ? bits : largest;
  }
  return largest;
}

// ---- updates ----

// Without a working parameter nothing is written beside the master.
struct NoWorking {};

inline void store_one(float value, float& destination) { destination = value; }
inline void store_one(float value, BFloat16& destination) {
  destination = narrow_one_bfloat16(value);
}
inline void store_one(float value, Half& destination) { destination = narrow_one_half(value); }

// The cast is made in the loop of the update, for fp16 too, where F16C cannot be
// used then: a second loop over chunks, though in the cache, is 15 % slower.
template <bool kAmsgrad, bool kDecoupled, class W>
void adam_loop(const AdamCoefficients c, float gradient_coefficient, int64_t numel,
               float* __restrict p, float* __restrict m, float* __restrict v,
               float* __restrict max_v, const float* __restrict gradient, W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    // Copies, so that the compiler sees every store through its own __restrict pointer.
    float p_i = p[i];
    float m_i = m[i];
    float v_i = v[i];
    float max_v_i = kAmsgrad ? max_v[i] : 0.0F;
    adam_element<kAmsgrad, kDecoupled>(c, gradient[i] * gradient_coefficient, p_i, m_i, v_i,
                                       max_v_i);
    p[i] = p_i;
    m[i] = m_i;
    v[i] = v_i;
    if constexpr (kAmsgrad) {
      max_v[i] = max_v_i;
    }
    if constexpr (!__is_same(W, NoWorking)) {
      store_one(p_i, working[i]);
    }
  }
}

void adam_range(const AdamSegment& range, const AdamCoefficients& c, float gradient_coefficient,
                ElementType working_type) {
  const auto run = [&]<class W>(W*) {
    const auto loop = c.amsgrad
                          ? (c.decoupled ? adam_loop<true, true, W> : adam_loop<true, false, W>)
                          : (c.decoupled ? adam_loop<false, true, W> : adam_loop<false, false, W>);
    loop(c, gradient_coefficient, range.numel, range.master, range.exp_avg, range.exp_avg_sq,
         range.max_exp_avg_sq, range.gradient, static_cast<W*>(range.working));
  };
  range.working == nullptr ? run(static_cast<NoWorking*>(nullptr)) : with_type(working_type, run);
}

template <bool kMomentum, bool kFirst, class W>
void sgd_loop(const SgdCoefficients c, float gradient_coefficient, int64_t numel,
              float* __restrict p, float* __restrict b, const float* __restrict gradient,
              W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    float p_i = p[i];
    float b_i = kMomentum && !kFirst ? b[i] : 0.0F;
    sgd_element<kMomentum, kFirst>(c, gradient[i] * gradient_coefficient, p_i, b_i);
    p[i] = p_i;
    if constexpr (kMomentum) {
      b[i] = b_i;
    }
    if constexpr (!__is_same(W, NoWorking)) {
      store_one(p_i, working[i]);
    }
  }
}

void sgd_range(const SgdSegment& range, const SgdCoefficients& c, float gradient_coefficient,
               ElementType working_type) {
  const auto run = [&]<class W>(W*) {
    const auto loop = c.momentum == 0.0F ? sgd_loop<false, false, W>
                      : range.first_step ? sgd_loop<true, true, W>
                                         : sgd_loop<true, false, W>;
    loop(c, gradient_coefficient, range.numel, range.master, range.momentum, range.gradient,
         static_cast<W*>(range.working));
  };
  range.working == nullptr ? run(static_cast<NoWorking*>(nullptr)) : with_type(working_type, run);
}

template <class W>
void lion_loop(const LionCoefficients c, float gradient_coefficient, int64_t numel,
               float* __restrict p, float* __restrict m, const float* __restrict gradient,
               W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    float p_i = p[i];
    float m_i = m[i];
    lion_element(c, gradient[i] * gradient_coefficient, p_i, m_i);
    p[i] = p_i;
    m[i] = m_i;
    if constexpr (!__is_same(W, NoWorking)) {
      store_one(p_i, working[i]);
    }
  }
}

void lion_range(const LionSegment& range, const LionCoefficients& c, float gradient_coefficient,
                ElementType working_type) {
  const auto run = [&]<class W>(W*) {
    lion_loop<W>(c, gradient_coefficient, range.numel, range.master, range.exp_avg, range.gradient,
                 static_cast<W*>(range.working));
  };
  range.working == nullptr ? run(static_cast<NoWorking*>(nullptr)) : with_type(working_type, run);
}

constexpr RangeKernels make_range_kernels(const char* name) {
  return {name,
          cast_copy_range,
          sum_rows_range,
          encode_block_int8_range,
          sum_block_int8_range,
          sum_of_squares_range,
          sum_of_abs_range,
          count_nonfinite_range,
          max_abs_bits_range,
          adam_range,
          sgd_range,
          lion_range};
}

}  // namespace
}  // namespace zero::kernels
