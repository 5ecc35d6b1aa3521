// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// fp32 masters in two halves of 16 bits, without loss: the upper one is the working value in bf16,
// the lower one what the master has besides.
//
// A master with the bits b has the halves
//
//   upper = (b + 0x8000) >> 16       as the bits of a bf16
//   lower = b - (upper << 16)        as an int16
//
// and they make b = (upper << 16) + lower, all modulo 2^32. The upper half is the master rounded to
// nearest, ties away from zero: it differs from torch's cast, which rounds ties to even, where the
// lower 16 bits of b are 0x8000 and at most there. Every finite number and both infinities are
// restored bit for bit; the 65,536 finite ones of the largest magnitude have an infinite upper
// half. A NaN has upper = (b >> 16) | 0x40, a quiet NaN, and lower = 0: its payload is lost.
//
// Segments with a `remainder` (segments.h) have their masters in this form, and updates read and
// write it.
#pragma once

#include <cstdint>

#include "kernels/stream.h"

namespace zero::kernels {

// master[i] = the number whose halves are upper[i], of bf16, and lower[i]. No two arrays overlap.
// Throws c10::Error for numel < 0 and for null pointers of elements.
void join_halves(const void* upper, const int16_t* lower, int64_t numel, float* master,
                 Stream stream);

// The inverse.
void split_halves(const float* master, int64_t numel, void* upper, int16_t* lower, Stream stream);

}  // namespace zero::kernels
