// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Maps each operation to one collective of the backend, which is best on NCCL.
#pragma once

#include "zero/comm/row_exchange.h"

namespace zero {

// The current stream waits for operations on tensors of a GPU, never the host.
class WholeExchange : public RowExchange {
 public:
  using RowExchange::RowExchange;

  int64_t exchange(const at::Tensor& rows, const at::Tensor& received,
                   Operation& operation) override;
  // Passes one row to `use` for fp32: the result of the backend's reduce-scatter. For other dtypes,
  // whose partial sums the backend would round, passes the rows of all ranks in rank order.
  int64_t reduce(const at::Tensor& rows, const at::Tensor& buffer, UseRows use,
                 Operation& operation) override;
  int64_t reduction_bytes(const at::Tensor& rows) const override;
  int64_t gather(const at::Tensor& rows, Operation& operation) override;
  int64_t all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                     Operation& operation) override;
  int64_t broadcast(const at::Tensor& tensor, int source, Operation& operation) override;

 private:
  void start_all_to_all(const at::Tensor& rows, const at::Tensor& received, Operation& operation);
};

}  // namespace zero
