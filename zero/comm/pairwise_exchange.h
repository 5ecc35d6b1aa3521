// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Exchanges rows by a send and a receive per peer. Fastest on Gloo, and a failed wait names its
// peer. Rows of a GPU are staged in pinned host memory, so that a call blocks for the current
// stream.
#pragma once

#include <c10/util/FunctionRef.h>

#include "zero/comm/row_exchange.h"

namespace zero {

// The receives of exchange() and reduce() start in Operation::wait().
class PairwiseExchange : public RowExchange {
 public:
  using RowExchange::RowExchange;

  int64_t exchange(const at::Tensor& rows, const at::Tensor& received,
                   Operation& operation) override;
  // Passes the rows of all ranks to `use`, in rank order.
  int64_t reduce(const at::Tensor& rows, const at::Tensor& buffer, UseRows use,
                 Operation& operation) override;
  int64_t reduction_bytes(const at::Tensor& rows) const override;
  int64_t gather(const at::Tensor& rows, Operation& operation) override;
  // An exchange of all values with all ranks: they are few, a ring would take 2(W-1) delays one
  // after the other instead of one, and a rank that is missing is named.
  int64_t all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                     Operation& operation) override;
  int64_t broadcast(const at::Tensor& tensor, int source, Operation& operation) override;
  void hang_up() noexcept override;

 protected:
  // Returns a tag that is the same on all ranks and that no other operation under way has.
  int new_tag();
  // Calls start(); an error names `peer`.
  static void naming(int peer, c10::function_ref<void()> start);
  void send_row(const at::Tensor& row, int peer, int tag, Operation& operation);
  void receive_row(const at::Tensor& into, int peer, int tag, Operation& operation);
  // Sends row_to(peer) to each peer; returns the tag.
  int send(c10::function_ref<at::Tensor(int peer)> row_to, Operation& operation);
  // Calls start(peer) for each peer, in the order in which the peers send to this rank.
  void for_each_sender(c10::function_ref<void(int peer)> start) const;
  // Returns the size of the W-1 rows of `rows` that are for peers.
  int64_t bytes_to_peers(const at::Tensor& rows) const;

 private:
  // Starts to receive row `peer` of `into` from each peer.
  void receive(int tag, const at::Tensor& into, Operation& operation);
  // Returns the memory that receives for `received`.
  at::Tensor start_exchange(const at::Tensor& rows, const at::Tensor& received,
                            Operation& operation);

  int next_tag_ = 0;
};

}  // namespace zero
