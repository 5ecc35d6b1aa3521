// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Maps each operation to one collective of the backend, which is best on NCCL.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "zero/comm/exchange/collective_order.h"
#include "zero/comm/exchange/row_exchange.h"

namespace zero {

// The current stream waits for operations on tensors of a GPU, never the host.
class WholeExchange : public BackendExchange {
 public:
  using BackendExchange::BackendExchange;
  ~WholeExchange() override;

  SentBytes exchange(const at::Tensor& rows, const at::Tensor& received,
                     Operation& operation) override;
  // Passes one row to `use` for fp32 rows of one length: the result of the backend's
  // reduce-scatter, unless sum_in_rank_order() was called. For other dtypes, whose partial sums the
  // backend would round, and for rows of different lengths, passes the rows of all ranks in rank
  // order.
  SentBytes reduce(const Rows& rows, const at::Tensor& buffer, const RowValues& values, UseRows use,
                   Operation& operation) override;
  int64_t reduction_bytes(const Rows& rows, const RowValues& values) const override;
  // Rows of different lengths are broadcast, those that are not empty: in one section of a backend
  // that has sections, which is one launch on NCCL, else one after the other.
  SentBytes gather(const Rows& rows, const at::Tensor& before, Operation& operation) override;
  SentBytes all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                       Operation& operation) override;
  int64_t all_reduce_bytes(const at::Tensor& values) const override;
  SentBytes broadcast(const at::Tensor& tensor, int source, Operation& operation) override;
  bool waits_on_host(c10::Device device) const override { return device.is_cpu(); }
  void follow(const std::shared_ptr<CollectiveOrder>& order) override { order_ = order; }
  void sum_in_rank_order() override { in_rank_order_ = true; }
  Error error() noexcept override;
  // The ends of NCCL wait for kernels on the device, also for those of other communicators, and for
  // as long as a CUDA graph lives that captured an operation. So they run on a thread of their own,
  // which the destructor leaves behind in the end.
  void hang_up() noexcept override;
  void shutdown() override;

 private:
  // Starts a collective that uses this memory, as a transfer of `operation`.
  using Start = std::function<c10::intrusive_ptr<c10d::Work>()>;
  void start(const std::vector<at::Tensor>& used, Operation& operation, const Start& collective);
  void start_all_to_all(const Rows& rows, const at::Tensor& received, Operation& operation);
  c10::intrusive_ptr<c10d::Work> start_broadcast(const at::Tensor& tensor, int source);
  void gather_by_broadcasts(const Rows& rows, Operation& operation);
  void end(void (c10d::Backend::*how)());
  bool summed_by_backend(const Rows& rows) const;

  // Null: the backend alone orders its collectives.
  std::shared_ptr<CollectiveOrder> order_;
  bool in_rank_order_ = false;
  std::future<bool> end_;  // valid from the first end on
};

}  // namespace zero
