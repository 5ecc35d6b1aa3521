// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The local half of a reduce-scatter: what every rank sent for this rank's
// shard is added up in rank order, in fp32, whatever the dtype on the wire was.
// The order makes the result equal to a serial sum over ranks, bit for bit, at
// every world size and for every way of cutting buckets.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "kernels/stream.h"

namespace zero::kernels {

// The arguments of sum_rows().
struct SumRowsArgs {
  // On the host, instead of `received` and `own`: the address of every rank's row, [numel] of dtype
  // each, wherever it is.
  const void* const* rows = nullptr;
  // [world_size, numel] of dtype; row r begins at element r * numel. Row
  // own_rank is never read. May be null when world_size is 1.
  const void* received = nullptr;
  // [numel] of dtype; takes the place of row own_rank in the sum. May be the
  // same address as `shard` when dtype is Float and world_size is 1.
  const void* own = nullptr;
  int64_t world_size = 1;
  int64_t own_rank = 0;
  int64_t numel = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;  // Float, BFloat16 or Half
  float scale = 1.0F;
  // [numel] fp32. Overlaps nothing else but, as said there, `own`.
  float* shard = nullptr;
  bool accumulate = false;
};

// shard[i] = scale * (((row_0[i] + row_1[i]) + row_2[i]) + ...), or, with
// accumulate, shard[i] += that product. All in fp32: each addition rounds, the
// product rounds, the accumulation rounds; nothing is fused, so that the bits
// are the same on every CPU, for every thread count, and on CUDA.
// Throws c10::Error for another dtype, a negative size, or a rank outside the world.
void sum_rows(const SumRowsArgs& args, Stream stream);

}  // namespace zero::kernels
