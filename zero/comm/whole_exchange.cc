// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/whole_exchange.h"

#include <utility>
#include <vector>

namespace zero {
namespace {

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

bool summed_by_backend(const at::Tensor& rows) { return rows.scalar_type() == at::kFloat; }

}  // namespace

void WholeExchange::start_all_to_all(const at::Tensor& rows, const at::Tensor& received,
                                     Operation& operation) {
  at::Tensor from = rows;
  at::Tensor into = received;
  std::vector<int64_t> equal_splits;
  c10d::AllToAllOptions options;
  options.timeout = timeout();
  operation.on_success([rows, received] {});
  operation.add_whole(backend().alltoall_base(into, from, equal_splits, equal_splits, options),
                      !rows.is_cpu());
}

SentBytes WholeExchange::exchange(const at::Tensor& rows, const at::Tensor& received,
                                  Operation& operation) {
  start_all_to_all(rows, received, operation);
  return sent((world_size() - 1) * bytes_of(rows) / world_size());
}

int64_t WholeExchange::reduction_bytes(const at::Tensor& rows, const RowValues& /*values*/) const {
  return summed_by_backend(rows) ? bytes_of(rows) / world_size() : bytes_of(rows);
}

SentBytes WholeExchange::reduce(const at::Tensor& rows, const at::Tensor& buffer,
                                const RowValues& /*values*/, UseRows use, Operation& operation) {
  SummandRows summands;
  summands.dtype = rows.scalar_type();
  at::Tensor received = buffer.view(rows.scalar_type());
  if (summed_by_backend(rows)) {
    at::Tensor from = rows;
    c10d::ReduceScatterOptions options;
    options.reduceOp = c10d::ReduceOp::SUM;
    options.timeout = timeout();
    operation.on_success([rows, received] {});
    operation.add_whole(backend()._reduce_scatter_base(received, from, options), !rows.is_cpu());
    summands.own_row = received.const_data_ptr();
  } else {
    start_all_to_all(rows, received.view(rows.sizes()), operation);
    summands.count = rows.size(0);
    summands.received = received.const_data_ptr();
    summands.own_row = rows.select(0, rank()).const_data_ptr();
    summands.own = rank();
  }
  operation.on_received([summands, use = std::move(use)] { use(summands); });
  return sent((world_size() - 1) * bytes_of(rows) / world_size());
}

SentBytes WholeExchange::gather(const at::Tensor& rows, Operation& operation) {
  at::Tensor all = rows.contiguous();
  at::Tensor own = rows.select(0, rank());
  c10d::AllgatherOptions options;
  options.timeout = timeout();
  if (!all.is_same(rows)) operation.on_received([rows, all] { rows.copy_(all); });
  operation.on_success([rows, all] {});
  operation.add_whole(backend()._allgather_base(all, own, options), !rows.is_cpu());
  return sent((world_size() - 1) * bytes_of(rows) / world_size());
}

int64_t WholeExchange::all_reduce_bytes(const at::Tensor& values) const {
  return 2 * (world_size() - 1) * bytes_of(values) / world_size();
}

SentBytes WholeExchange::all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                                    Operation& operation) {
  std::vector<at::Tensor> tensors{values};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.timeout = timeout();
  operation.on_success([values] {});
  operation.add_whole(backend().allreduce(tensors, options), !values.is_cpu());
  return sent(all_reduce_bytes(values));
}

SentBytes WholeExchange::broadcast(const at::Tensor& tensor, int source, Operation& operation) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  options.timeout = timeout();
  operation.on_success([tensor] {});
  operation.add_whole(backend().broadcast(tensors, options), !tensor.is_cpu());
  return sent(rank() == source ? (world_size() - 1) * bytes_of(tensor) : 0);
}

}  // namespace zero
