// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The sum of rows in an order that the caller gives as a list of additions, such as that of a tree
// (bookkeeping/sum_tree.h). sum_rows() is the sum in the order of the rows.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "kernels/stream.h"

namespace zero::kernels {

// Row `into` becomes the sum of the rows `into` and `from`, which is not used any more.
struct RowAddition {
  int64_t into = 0;
  int64_t from = 0;
  int64_t place = 0;  // of the sum in the workspace; no other sum is there until it is used
};

struct SumTreeArgs {
  // On the host: the address of every row, [numel] of dtype each; unchanged.
  c10::ArrayRef<const void*> rows;
  // count - 1 of them for `count` rows, the last one into row 0.
  c10::ArrayRef<RowAddition> additions;
  int64_t places = 0;  // above each `place`
  int64_t numel = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;  // Float, BFloat16 or Half
  float scale = 1.0F;
  // [numel] fp32. Overlaps nothing else, but may be the only row where that is of Float.
  float* shard = nullptr;
  bool accumulate = false;
  // [(places + 1) * numel] fp32 of device memory; unused on the CPU and may be null there.
  float* workspace = nullptr;
};

// shard[i] = scale * the sum of the rows, or, with accumulate, shard[i] += that product. All in
// fp32: each addition rounds, the product rounds, the accumulation rounds; nothing is fused, so
// that the bits are the same on every CPU, for every thread count, and on CUDA. Throws c10::Error
// for another dtype, no row, a negative size, and additions that leave more than one row.
void sum_tree(const SumTreeArgs& args, Stream stream);

}  // namespace zero::kernels
