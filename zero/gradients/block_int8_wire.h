// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients in 8 bits, with an fp32 scale for each 256 values of a row: see kernels/block_int8.h
// for the layout and the bound of the error.
//
// A block may hold pieces of several parameters, and its scale is known when the last of them is
// there. So gradients are packed unrounded into a buffer of their own dtype, which is encoded when
// the bucket is full, and given back. That buffer is cleared first: padding of unspecified contents
// would enlarge the scale of its block, or make it NaN.
#pragma once

#include "zero/gradients/wire_format.h"

namespace zero {

class BlockInt8Wire final : public WireFormat {
 public:
  // Float, BFloat16 or Half: the dtype in which local gradients are accumulated.
  explicit BlockInt8Wire(c10::ScalarType packed_dtype) : packed_dtype_(packed_dtype) {}

  int64_t bytes(int64_t numel) const override;
  c10::ScalarType packed_dtype() const override { return packed_dtype_; }
  bool packs_in_place() const override { return false; }
  Rows open(const BucketRows& lengths, BufferPool& pool) const override;
  Rows encode(Rows packed, BufferPool& pool) const override;
  void decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                      bool accumulate) const override;
  // The sum of a machine's rows is encoded once more for other machines.
  bool encodes_sums() const override { return true; }
  void encode_sums(const at::Tensor& sums, const at::Tensor& rows) const override;

 private:
  BucketRows encoded_lengths(const Rows& packed) const;

  const c10::ScalarType packed_dtype_;
};

}  // namespace zero
