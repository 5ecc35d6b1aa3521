// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of norm.h and exact_sum.h. Included once by range_kernels_impl.h, for each
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_types.h"
#include "kernels/detail/exact_sum.h"

namespace zero::kernels {
namespace {

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
[[gnu::always_inline]] inline double sum_of(const float* values, int64_t numel) {
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
  if (i < numel) {
    double sums[kSums];
    __builtin_memcpy(sums, vectors, sizeof(sums));
    for (; i < numel; ++i) {
      const double x = values[i];
      sums[i % kSums] += kPower == Power::kSquare ? x * x : (x < 0.0 ? -x : x);
    }
    __builtin_memcpy(vectors, sums, sizeof(sums));
  }
  for (int64_t half = kSums / kLanes / 2; half > 0; half /= 2) {
    for (int64_t v = 0; v < half; ++v) {
      vectors[v] += vectors[v + half];
    }
  }
  double sums[kLanes];
  __builtin_memcpy(sums, vectors, sizeof(sums));
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
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

void add_squares_exactly_range(const float* values, int64_t numel, int64_t* sum) {
  for (int64_t begin = 0; begin < numel; begin += kExactBlock) {
    const int64_t end = smaller(begin + kExactBlock, numel);
    // With a constant length the sums of a whole block stay in registers.
    const double squares = end - begin == kExactBlock
                               ? sum_of<Power::kSquare>(values + begin, kExactBlock)
                               : sum_of<Power::kSquare>(values + begin, end - begin);
    if (is_finite_sum(squares)) {
      add_exactly(squares, sum);
      continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t magnitude = bits_of(values[i]) & 0x7fffffffU;
      sum[kExactLimbs] += magnitude == 0x7f800000U ? 1 : 0;
      sum[kExactLimbs + 1] += magnitude > 0x7f800000U ? 1 : 0;
    }
  }
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

}  // namespace
}  // namespace zero::kernels
