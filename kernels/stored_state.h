// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// State arrays of optimizers in fp32, bf16 and 8 bits: their bytes, and conversions from and to
// fp32.
//
// A state array holds averages of gradients (exp_avg, momentum) or second moments (exp_avg_sq, here
// called roots, since 8 bits store the root r = sqrt(v)). With kInt8, blocks of kStateBlock
// elements share one fp32 scale L, the largest |x| or r of the block, and an element has a code q:
//
//   n elements   | scale of block 0 | scale of block 1 | ... | n codes of one byte |
//
//   averages   q in [-127, 127]   x = sign(q) * ((q*q) * (1/16129)) * L
//   roots      q in [0, 255]      r = ((q*q) * (1/65025)) * L,   v = r * r
//
// All operations are rounded to fp32 and nothing is fused, so that bits are the same on every CPU,
// for every thread count, and on CUDA. Codes of squares are dense where values are small: with
// nearest rounding x differs by at most (|q| + 1/2) / 16129 * L, about |x| / |q|, or by L / 32258
// around 0. The largest magnitude of a block is exact.
//
//   - Zeros are exact. v > 0 has q >= 1, so that a denominator does not become 0 by rounding, if
//     the block's largest v is above 2^-117. A root below L / 65025 becomes that.
//   - A scale below 2^-100 is stored as 0, and so are its codes.
//   - A block with a NaN, or with an infinite average, decodes to NaN.
//   - Infinite second moments of a block become its largest one, the float below 2^128.
//
// An update (adam.h, sgd.h, lion.h) rounds codes and bf16 up or down at random, with the
// probabilities that make x, r, or the bf16 number right on average: nearest rounding would leave
// an average where it is as soon as a step changes it by less than half a code. The randomness is
// the noise of detail/state_noise.h. r being right, but for roots that become L / 65025, the
// average of v is too large by v / q at most.
//
// encode_state() rounds to nearest: codes are chosen between the squares, ties down, and bf16 is
// rounded to even. It gives the stored bits of what decode_state() made of them back; of roots as
// long as no v that is not 0 is subnormal, which holds for scales of at least 2^-47.
//
// Host memory only. Source of block-wise 8-bit state: T. Dettmers et al., "8-bit Optimizers via
// Block-wise Quantization", ICLR 2022, whose codes are others.
#pragma once

#include <cstdint>

#include "kernels/segments.h"

namespace zero::kernels {

// Bytes of a state array of `numel` elements.
int64_t state_bytes(StateType type, int64_t numel);

// values[i] = element i of the array, in fp32; with `root`, second moments v and not their roots.
void decode_state(StateType type, bool root, const void* stored, int64_t numel, float* values);

// The reverse, with nearest rounding. `stored` receives state_bytes() bytes, at a float's
// alignment.
void encode_state(StateType type, bool root, const float* values, int64_t numel, void* stored);

}  // namespace zero::kernels
