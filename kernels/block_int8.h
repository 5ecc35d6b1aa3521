// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Rows of gradients in 8 bits: blocks of kInt8Block values share one fp32 scale.
//
//   row of n values   | scale of block 0 | scale of block 1 | ... | n int8 values | zeros |
//
// The zeros fill a row up to a multiple of 4 bytes. The last block may be shorter. A row begins at
// a float's alignment, and each is encoded by itself.
//
//   scale    = max|x| / 127 of the block, and at most the largest float of which 127 are finite
//   encoded  = x / scale, rounded to nearest, ties to even
//   decoded  = scale * encoded
//
// All three are rounded to fp32 and nothing is fused, so that bits are the same on every CPU and
// for every thread count. A decoded value differs from x by at most max|x| / 254, and rounding adds
// less than max|x| / 2^22 + 2^-143; the second term matters in blocks of subnormal numbers alone,
// which may become zeros. Zeros, also of a mixed block, are decoded to 0. A block with a NaN or an
// infinity has the scale NaN, and each of its values is decoded to NaN.
//
// Host memory only: a Stream of CUDA throws c10::Error.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// Bytes of an encoded row.
int64_t block_int8_bytes(int64_t numel);

// Encodes `rows` rows.
//   source       [rows, numel] of source_dtype: Float, BFloat16 or Half
//   destination  [rows, block_int8_bytes(numel)] bytes; not overlapping `source`
void encode_block_int8(const void* source, c10::ScalarType source_dtype, int64_t rows,
                       int64_t numel, void* destination, Stream stream);

// The arguments of sum_block_int8().
struct SumBlockInt8Args {
  // The address of every rank's encoded row, in rank order; or `received` and `own`.
  const void* const* rows = nullptr;
  // [world_size, block_int8_bytes(numel)]. Row own_rank is never read. May be null when world_size
  // is 1.
  const void* received = nullptr;
  const void* own = nullptr;  // [block_int8_bytes(numel)]; takes the place of row own_rank
  int64_t world_size = 1;
  int64_t own_rank = 0;
  int64_t numel = 0;
  float scale = 1.0F;
  float* shard = nullptr;  // [numel] fp32, overlaps nothing else
  bool accumulate = false;
};

// sum_rows() of kernels/sum_rows.h over decoded rows: shard[i] = scale * ((x_0[i] + x_1[i]) + ...),
// or with accumulate shard[i] += that product, in fp32 and in rank order.
void sum_block_int8(const SumBlockInt8Args& args, Stream stream);

}  // namespace zero::kernels
