// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/elementwise_wire.h"

#include "kernels/cast.h"
#include "kernels/sum_rows.h"
#include "zero/memory/device_stream.h"

namespace zero {

int64_t ElementwiseWire::bytes(int64_t numel) const {
  return numel * static_cast<int64_t>(c10::elementSize(dtype_));
}

void ElementwiseWire::decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                                     bool accumulate) const {
  auto args = sum_arguments<kernels::SumRowsArgs>(rows, shard, scale, accumulate);
  args.dtype = rows.dtype;
  kernels::sum_rows(args, current_stream(shard.device()));
}

void ElementwiseWire::encode_sums(const at::Tensor& sums, const at::Tensor& rows) const {
  kernels::cast_copy(sums.const_data_ptr(), at::kFloat, rows.mutable_data_ptr(), dtype_,
                     sums.numel(), /*addend=*/nullptr, current_stream(sums.device()));
}

}  // namespace zero
