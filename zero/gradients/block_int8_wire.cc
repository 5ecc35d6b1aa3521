// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/block_int8_wire.h"

#include <c10/util/Exception.h>

#include "kernels/block_int8.h"
#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {

int64_t BlockInt8Wire::bytes(int64_t numel) const { return kernels::block_int8_bytes(numel); }

at::Tensor BlockInt8Wire::open(int64_t world_size, int64_t row_numel, BufferPool& pool) const {
  const at::Tensor packed = pool.take(world_size * row_numel, packed_dtype_);
  kernels::fill_zero(packed.mutable_data_ptr(), static_cast<int64_t>(packed.nbytes()),
                     current_stream(packed.device()));
  return packed.view({world_size, row_numel});
}

at::Tensor BlockInt8Wire::encode(at::Tensor packed, BufferPool& pool) const {
  const int64_t world_size = packed.size(0);
  const int64_t row_bytes = bytes(packed.size(1));
  at::Tensor rows = pool.take(world_size * row_bytes, at::kByte).view({world_size, row_bytes});
  kernels::encode_block_int8(packed.const_data_ptr(), packed_dtype_, world_size, packed.size(1),
                             rows.mutable_data_ptr(), current_stream(packed.device()));
  pool.give(packed);
  return rows;
}

void BlockInt8Wire::decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                                   bool accumulate) const {
  TORCH_INTERNAL_ASSERT(rows.dtype == at::kByte, "rows as they were encoded, got ", rows.dtype);
  kernels::SumBlockInt8Args args;
  args.rows = rows.addresses;
  args.received = rows.received;
  args.own = rows.own_row;
  args.world_size = rows.count;
  args.own_rank = rows.own;
  args.numel = shard.numel();
  args.scale = scale;
  args.shard = shard.mutable_data_ptr<float>();
  args.accumulate = accumulate;
  kernels::sum_block_int8(args, current_stream(shard.device()));
}

void BlockInt8Wire::encode_sums(const at::Tensor& sums, const at::Tensor& rows) const {
  kernels::encode_block_int8(sums.const_data_ptr(), at::kFloat, sums.size(0), sums.size(1),
                             rows.mutable_data_ptr(), current_stream(sums.device()));
}

}  // namespace zero
