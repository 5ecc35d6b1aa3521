// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/reduction.h"

#include <string>
#include <utility>

#include "zero/base/error_text.h"
#include "zero/memory/bucket_memory.h"
#include "zero/memory/trace_range.h"

namespace zero {
namespace {

// shard (+)= scale * the sum of these rows, in fp32.
void sum(const BucketReduction& reduction, const SummandRows& rows, BufferPool& pool) {
  if (reduction.shard.scalar_type() == at::kFloat) {
    reduction.wire->decode_and_sum(rows, reduction.shard, reduction.scale, reduction.accumulate);
    return;
  }
  const at::Tensor values = pool.acquire(reduction.shard.numel(), at::kFloat);
  if (reduction.accumulate) convert(reduction.shard, values);
  reduction.wire->decode_and_sum(rows, values, reduction.scale, reduction.accumulate);
  convert(values, reduction.shard);
  pool.release(values);
}

}  // namespace

void reduce_alone(const BucketReduction& reduction, BufferPool& pool) {
  SummandRows own;
  const at::Tensor& values = reduction.rows.values();
  own.dtype = values.scalar_type();
  own.own_row = values.const_data_ptr();
  sum(reduction, own, pool);
  pool.release(values);
}

Exchange start_exchange(BucketReduction reduction, BufferPool& pool) {
  Exchange exchange{std::move(reduction), {}, {}};
  const BucketReduction& r = exchange.reduction;
  const std::string label = "gradient bucket " + std::to_string(r.bucket);
  const RowValues values{r.wire, r.wire->sum_numel(r.shard.numel())};
  const int64_t bytes = RowCommunicator(*r.group).reduction_bytes(r.rows, values);
  if (bytes > 0) exchange.buffer = pool.acquire(bytes, at::kByte, BufferPool::Order::kWait);
  exchange.pending = RowCommunicator(*r.group).reduce_rows(
      r.rows, exchange.buffer, [r, &pool](const SummandRows& rows) { sum(r, rows, pool); }, label,
      values);
  return exchange;
}

void finish_exchange(Exchange& exchange, BufferPool& pool) {
  const TraceRange range("reduce", exchange.reduction.bucket);
  exchange.pending.wait();
  if (exchange.buffer.defined()) pool.release(exchange.buffer);
  pool.release(exchange.reduction.rows.values());
}

void end_group(Communicator& group) {
  if (!group.failed().empty()) return;
  group.abort(c10::str("a reduction failed on rank ", group.rank(), " of group \"", group.name(),
                       "\": ", text_of_caught()));
}

}  // namespace zero
