// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/replica_sum.h"

#include <deque>

#include "kernels/sum_rows.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

struct ReplicaExchange {
  const ReplicaShard* item;
  at::Tensor rows;      // [replicas, n / replicas rounded up]
  at::Tensor received;  // the same
  Pending pending;
};

ReplicaExchange start(const ReplicaShard& item, BufferPool& pool) {
  const int64_t ranks = item.replicas->world_size();
  const int64_t numel = item.shard.numel();
  if (numel == 0) return {&item, {}, {}, {}};
  const int64_t chunk = (numel + ranks - 1) / ranks;
  const at::Tensor flat = pool.acquire(ranks * chunk, at::kFloat);
  flat.narrow(0, 0, numel).copy_(item.shard);
  flat.narrow(0, numel, ranks * chunk - numel).zero_();
  ReplicaExchange result{&item,
                         flat.view({ranks, chunk}),
                         pool.acquire(ranks * chunk, at::kFloat).view({ranks, chunk}),
                         {}};
  result.pending = item.replicas->exchange_rows(result.rows, result.received, item.label);
  return result;
}

void finish(ReplicaExchange& exchange, BufferPool& pool) {
  if (!exchange.rows.defined()) return;
  exchange.pending.wait();
  const at::Tensor& rows = exchange.rows;
  Communicator& replicas = *exchange.item->replicas;
  const at::Tensor own = rows.select(0, replicas.rank());
  const at::Tensor sum = pool.acquire(own.numel(), at::kFloat);
  kernels::SumRowsArgs args;
  args.received = exchange.received.const_data_ptr();
  args.own = own.const_data_ptr();
  args.world_size = replicas.world_size();
  args.own_rank = replicas.rank();
  args.numel = own.numel();
  args.shard = sum.mutable_data_ptr<float>();
  kernels::sum_rows(args, current_stream(sum.device()));
  own.copy_(sum);
  replicas.gather_rows(rows, exchange.item->label).wait();
  exchange.item->shard.copy_(rows.view({-1}).narrow(0, 0, exchange.item->shard.numel()));
  for (const at::Tensor& buffer : {rows, exchange.received, sum}) pool.release(buffer);
}

}  // namespace

void sum_over_replicas(const std::vector<ReplicaShard>& shards, BufferPool& pool) {
  std::deque<ReplicaExchange> under_way;
  for (const ReplicaShard& item : shards) {
    under_way.push_back(start(item, pool));
    if (under_way.size() < 2) continue;
    finish(under_way.front(), pool);
    under_way.pop_front();
  }
  for (ReplicaExchange& exchange : under_way) finish(exchange, pool);
}

}  // namespace zero
