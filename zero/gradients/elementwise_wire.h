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
  // Float, BFloat16 or Half. With `fp32_sums`, the sum of a machine's rows is sent in fp32.
  explicit ElementwiseWire(c10::ScalarType dtype, bool fp32_sums = true)
      : dtype_(dtype), encodes_sums_(!fp32_sums && dtype != c10::ScalarType::Float) {}

  int64_t bytes(int64_t numel) const override;
  c10::ScalarType packed_dtype() const override { return dtype_; }
  void decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                      bool accumulate) const override;
  bool encodes_sums() const override { return encodes_sums_; }
  void encode_sums(const at::Tensor& sums, const at::Tensor& rows) const override;

 private:
  const c10::ScalarType dtype_;
  const bool encodes_sums_;
};

}  // namespace zero
