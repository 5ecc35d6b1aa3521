// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Exchanges rows by a send and a receive per peer. Fastest on Gloo, and a failed wait names its
// peer. Rows of a GPU are staged in pinned host memory, so that a call blocks for the current
// stream.
#pragma once

#include <c10/util/FunctionRef.h>

#include <chrono>
#include <cstddef>
#include <memory>

#include "zero/comm/backends/connection_watch.h"
#include "zero/comm/exchange/row_exchange.h"

namespace zero {

// Between ranks of one machine the receives of exchange() and reduce() start in Operation::wait();
// over links they start at once, so that no sender waits for them.
class PairwiseExchange : public BackendExchange {
 public:
  PairwiseExchange(BackendPtr backend, std::chrono::milliseconds timeout, BackendRanks ranks);

  SentBytes exchange(const at::Tensor& rows, const at::Tensor& received,
                     Operation& operation) override;
  // Passes the rows of all ranks to `use`, in rank order.
  SentBytes reduce(const Rows& rows, const at::Tensor& buffer, const RowValues& values, UseRows use,
                   Operation& operation) override;
  int64_t reduction_bytes(const Rows& rows, const RowValues& values) const override;
  SentBytes gather(const Rows& rows, const at::Tensor& before, Operation& operation) override;
  // True for rows in host memory, of ranks on different machines.
  bool sends_changes(c10::ScalarType dtype, c10::Device device) const override;
  // Up to kAllWithAll ranks an exchange of all values with all ranks, added up in rank order: they
  // are few, a ring would take 2(W-1) delays one after the other instead of one, and a rank that is
  // missing is named. More ranks combine their values in log2(W) steps with one rank each
  // (doubling_steps.h).
  static constexpr int kAllWithAll = 8;
  SentBytes all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                       Operation& operation) override;
  int64_t all_reduce_bytes(const at::Tensor& values) const override;
  // In a binomial tree: of 8 ranks, counted from the source, 0 sends to 4, 2 and 1, and 4 to 6
  // and 5.
  SentBytes broadcast(const at::Tensor& tensor, int source, Operation& operation) override;
  bool has_ended(int rank_name) noexcept override;

 protected:
  // Calls start(); an error names `peer`.
  void naming(int peer, c10::function_ref<void()> start) const;
  // Nothing for an empty row, which the other side does not expect or send either.
  void send_row(const at::Tensor& row, int peer, int tag, Operation& operation);
  void receive_row(const at::Tensor& into, int peer, int tag, Operation& operation);
  // Sends row_to(peer) to each peer.
  void send(int tag, Operation& operation, c10::function_ref<at::Tensor(int peer)> row_to);
  // Returns whether a message to `peer` may be shorter than the memory that receives it, as Gloo
  // permits.
  virtual bool may_be_shorter(int /*peer*/) const { return true; }
  // Calls start(peer) for each peer, in the order in which the peers send to this rank.
  void for_each_sender(c10::function_ref<void(int peer)> start) const;

 private:
  // Starts to receive row `peer` of `into` from each peer.
  void receive(int tag, const Rows& into, Operation& operation);
  // Returns the memory that receives for `received`.
  at::Tensor start_exchange(const Rows& rows, const at::Tensor& received, Operation& operation);
  SentBytes gather_changes(const Rows& rows, const at::Tensor& before, Operation& operation);
  SentBytes all_with_all(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                         Operation& operation);
  SentBytes recursive_doubling(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                               Operation& operation);
  struct Doubling;
  void start_doubling_step(size_t i, const std::shared_ptr<Doubling>& doubling,
                           Operation& operation);

  ConnectionWatch watch_;
};

}  // namespace zero
