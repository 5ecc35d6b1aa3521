// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the noise that rounds state of 16 and 8 bits, for the CPU loops and the CUDA kernels.
//
// The noise is a function of the number of the step, of the parameter and of the element in it, and
// of nothing else: ranks, buckets, segments, threads and devices do not change it. For element e,
//
//   seed   = mix(mix(step / 16 + g) + parameter)            once a segment
//   key    = upper 32 bits of mix(seed + e / 256)           once a block of kStateBlock elements
//   noise  = key + (e % 256 + step % 16) * 0x9e379e37       32 bits for each element
//
// modulo 2^64 and 2^32. The lower 16 bits are for the first state array (exp_avg, momentum) and the
// upper 16 for the second (exp_avg_sq); as a fraction they are u = bits * 2^-16, in [0, 1).
//
// mix() is the output function of splitmix64 and g its increment, the golden ratio: G. Steele,
// D. Lea and C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
// constants of D. Stafford's mix 13. So u is uniform for every element, and independent in steps
// of different sixteens (step / 16), which is what makes rounding right on average. In a block, and
// for an element in 16 steps, the u are multiples of the golden ratio, 0x9e37 * 2^-16, behind a
// random shift (R. Cranley and T. Patterson, SIAM J. Numer. Anal. 13, 1976): they are spread
// evenly, so that the errors of a block, and of an average over some steps, nearly cancel. An
// average of 10 steps is off by a fifth less than with independent u (docs/benchmarks/moments.md).
// With multiples of one shift in all steps errors add up where batches come again in the same
// order: 89 * golden ratio is nearly whole.
#pragma once

#include <cstdint>

#include "kernels/detail/update_rules.h"
#include "kernels/segments.h"

namespace zero::kernels {

// The number of a step: where device_step is not null, it is read there, in memory of the kernels.
struct NoiseStep {
  int64_t step;
  const double* device_step;
};

ZERO_KERNELS_INLINE uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

struct NoiseSeed {
  uint64_t seed;
  uint32_t phase;  // of the step, in its 16
};

ZERO_KERNELS_INLINE NoiseSeed noise_seed(const NoiseStep& noise, int64_t parameter) {
  const auto step = static_cast<uint64_t>(
      noise.device_step != nullptr ? static_cast<int64_t>(*noise.device_step) : noise.step);
  const uint64_t of_steps = mix64(step / 16 + 0x9e3779b97f4a7c15U);
  return {mix64(of_steps + static_cast<uint64_t>(parameter)), static_cast<uint32_t>(step % 16)};
}

// `index` is the number of the element in its block.
ZERO_KERNELS_INLINE constexpr uint32_t noise_of(uint32_t key, uint32_t index) {
  return key + index * 0x9e379e37U;
}

// The key of a block of which `element` is the first, counted from the first of the parameter.
ZERO_KERNELS_INLINE uint32_t noise_key(const NoiseSeed& noise, int64_t element) {
  const uint64_t of_block = mix64(noise.seed + static_cast<uint64_t>(element / kStateBlock));
  return noise_of(static_cast<uint32_t>(of_block >> 32), noise.phase);
}

}  // namespace zero::kernels
