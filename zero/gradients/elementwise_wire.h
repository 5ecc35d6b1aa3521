// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients as numbers of one dtype, one after another: fp32, bf16 or fp16. Packing rounds each of
// them once; nothing else does until the sum, which is made in fp32. Padding is unspecified.
#pragma once

#include "zero/gradients/wire_format.h"

namespace zero {

class ElementwiseWire final : public WireFormat {
 public:
  // Float, BFloat16 or Half.
  explicit ElementwiseWire(c10::ScalarType dtype) : dtype_(dtype) {}

  int64_t bytes(int64_t numel) const override;
  c10::ScalarType packed_dtype() const override { return dtype_; }
  bool packs_in_place() const override { return true; }
  at::Tensor open(int64_t world_size, int64_t row_numel, BufferPool& pool) const override;
  at::Tensor encode(at::Tensor packed, BufferPool& pool) const override;
  void decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                      bool accumulate) const override;

 private:
  const c10::ScalarType dtype_;
};

}  // namespace zero
