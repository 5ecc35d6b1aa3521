// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What has changed in a row of numbers, without loss: a row as it was and the encoded changes give
// the row as it is, bit by bit. A step of an optimizer changes a parameter by about the learning
// rate, so that most of its high bits stay what they were.
//
//   blocks of kChangesBlock values, the last one shorter:
//   | reach, 2 bytes | change of value 0, in bits | change of value 1 | ... | up to a whole byte |
//
// Numbers of b bits are taken for integers in the order of their values: negative ones are turned
// over. The difference d of two such integers, modulo 2^b, is stored as 2 d, or as -2 d - 1 if it
// is negative, in
//
//   width = reach - exponent, 0 if that is negative, and b from kWholeWidth on
//
// bits, with the exponent that the value had before. So a change of one size takes more bits in
// small numbers, where it changes more bits, and both sides know how many. From kWholeWidth on, 3
// more than the mantissa has, the change may be larger than the number, and turn all of its bits.
// `reach` is the smallest with which all changes of the block fit; 0 if nothing has changed.
//
// Host memory only, on the calling thread.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace zero::kernels {

constexpr int64_t kChangesBlock = 128;

// Returns whether rows of `dtype` can be encoded: Float, BFloat16 and Half.
bool has_changes(c10::ScalarType dtype);

// Returns the most bytes that the changes of a row of `numel` values take.
int64_t max_changes_bytes(c10::ScalarType dtype, int64_t numel);

// Returns the number of bytes written.
//   before, after  [numel] of `dtype`
//   changes        [max_changes_bytes(dtype, numel)]; overlaps nothing else
int64_t encode_changes(const void* before, const void* after, c10::ScalarType dtype, int64_t numel,
                       uint8_t* changes);

// Turns `row`, which holds what it held before, into what it is. Returns false if `changes` does
// not have the length that the changes of such a row have; a part of the row may have changed then.
//   changes  [bytes]
//   row      [numel] of `dtype`
bool apply_changes(const uint8_t* changes, int64_t bytes, c10::ScalarType dtype, int64_t numel,
                   void* row);

}  // namespace zero::kernels
