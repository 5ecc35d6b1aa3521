// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the noise that rounds state of 16 and 8 bits, for the CPU loops and the CUDA kernels.
//
// The noise is a function of the number of the step, of the parameter and of the element in it, and
// of nothing else: ranks, buckets, segments, threads and devices do not change it. For element e,
//
//   seed   = mix(mix(step + g) + parameter)                 once a segment
//   key    = upper 32 bits of mix(seed + e / 256)           once a block of kStateBlock elements
//   noise  = key + (e % 256) * 0x9e379e37                   32 bits for each element
//
// modulo 2^64 and 2^32. The lower 16 bits are for the first state array (exp_avg, momentum) and the
// upper 16 for the second (exp_avg_sq); as a fraction they are u = bits * 2^-16, in [0, 1).
//
// mix() is the output function of splitmix64 and g its increment, the golden ratio: G. Steele,
// D. Lea and C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
// constants of D. Stafford's mix 13. So an element has independent and uniform u in all steps,
// which is what makes rounding right on average. In a block the u of one step are multiples of the
// golden ratio, 0x9e37 * 2^-16, behind a random shift (R. Cranley and T. Patterson, SIAM J. Numer.
// Anal. 13, 1976): they are spread evenly, so that the errors of a block nearly cancel, and cost
// one addition for each element. A hash of two multiplications for each took a tenth of an update.
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

ZERO_KERNELS_INLINE uint64_t noise_seed(const NoiseStep& noise, int64_t parameter) {
  const int64_t step =
      noise.device_step != nullptr ? static_cast<int64_t>(*noise.device_step) : noise.step;
  const uint64_t of_step = mix64(static_cast<uint64_t>(step) + 0x9e3779b97f4a7c15U);
  return mix64(of_step + static_cast<uint64_t>(parameter));
}

// `element` is the first of a block, counted from the first element of the parameter.
ZERO_KERNELS_INLINE uint32_t noise_key(uint64_t seed, int64_t element) {
  return static_cast<uint32_t>(mix64(seed + static_cast<uint64_t>(element / kStateBlock)) >> 32);
}

// `index` is the number of the element in its block.
ZERO_KERNELS_INLINE constexpr uint32_t noise_of(uint32_t key, uint32_t index) {
  return key + index * 0x9e379e37U;
}

}  // namespace zero::kernels
