// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/block_int8_wire.h"

#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "kernels/block_int8.h"
#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {

int64_t BlockInt8Wire::bytes(int64_t numel) const { return kernels::block_int8_bytes(numel); }

Rows BlockInt8Wire::open(const BucketRows& lengths, BufferPool& pool) const {
  Rows packed = WireFormat::open(lengths, pool);
  const at::Tensor& values = packed.values();
  kernels::fill_zero(values.mutable_data_ptr(), static_cast<int64_t>(values.nbytes()),
                     current_stream(values.device()));
  return packed;
}

BucketRows BlockInt8Wire::encoded_lengths(const Rows& packed) const {
  if (packed.equal()) return {packed.values().size(0), bytes(packed.values().size(1))};
  const BucketRows& lengths = packed.lengths();
  std::vector<int64_t> ends;
  for (const int64_t r : lengths.filled()) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + bytes(lengths.numel(r)));
  }
  return {lengths.count(), lengths.filled(), std::move(ends)};
}

Rows BlockInt8Wire::encode(Rows packed, BufferPool& pool) const {
  const BucketRows lengths = encoded_lengths(packed);
  Rows encoded(pool.acquire(lengths.total(), at::kByte), lengths);
  const auto stream = current_stream(packed.values().device());
  const auto encode_rows = [&](const at::Tensor& from, int64_t rows, int64_t numel,
                               const at::Tensor& to) {
    kernels::encode_block_int8(from.const_data_ptr(), packed_dtype_, rows, numel,
                               to.mutable_data_ptr(), stream);
  };
  if (packed.equal()) {
    encode_rows(packed.values(), packed.values().size(0), packed.values().size(1),
                encoded.values());
  } else {
    for (const int64_t r : lengths.filled()) {
      encode_rows(packed.row(r), 1, packed.row(r).numel(), encoded.row(r));
    }
  }
  pool.release(packed.values());
  return encoded;
}

void BlockInt8Wire::decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                                   bool accumulate) const {
  TORCH_INTERNAL_ASSERT(rows.dtype == at::kByte, "rows as they were encoded, got ", rows.dtype);
  kernels::sum_block_int8(sum_arguments<kernels::SumBlockInt8Args>(rows, shard, scale, accumulate),
                          current_stream(shard.device()));
}

void BlockInt8Wire::encode_sums(const at::Tensor& sums, const at::Tensor& rows) const {
  kernels::encode_block_int8(sums.const_data_ptr(), at::kFloat, sums.size(0), sums.size(1),
                             rows.mutable_data_ptr(), current_stream(sums.device()));
}

}  // namespace zero
