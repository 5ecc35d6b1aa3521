// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The algorithms that bring rows to their ranks, one file each. A new one derives from RowExchange,
// or from the one that it differs from, and is chosen in choose_exchange.cc.
// tests/comm/row_exchange_test.cc holds all of them to the contract below.
//
// Each collective method starts an operation and does not block: it adds the sends, the receives
// and the actions that follow them to `operation`, which blocks later and names the ranks that are
// missing. It returns what leaves this rank, and throws if it cannot start.
//
// `rows` is a contiguous matrix [world_size, n] of any dtype with at least one element. Where it is
// a Rows, rows may also differ in length. The caller leaves all tensors alone until the operation
// ends; the exchange keeps them alive until then.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zero/comm/exchange/operation.h"
#include "zero/comm/exchange/row_format.h"
#include "zero/communicator.h"
#include "zero/memory/rows.h"

namespace zero {

class CollectiveOrder;
class SharedMemoryBackend;

// Payload that leaves this rank.
struct SentBytes {
  int64_t all = 0;
  int64_t links = 0;  // of these, for ranks of other machines
};

// Thread safety: the caller of a collective method holds mutex().
class RowExchange : public std::enable_shared_from_this<RowExchange> {
 public:
  RowExchange() = default;
  virtual ~RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  // Orders the calls of the backend: backends number their calls without locks, and tags must be
  // given out in the order of the calls. Actions that start transfers in Operation::wait() lock it.
  std::mutex& mutex() { return mutex_; }

  // Collective. Row r of `received` becomes row `rank()` of rank r's `rows`. The own row of
  // `received` is unspecified.
  //   received  like `rows`, and apart from it
  virtual SentBytes exchange(const at::Tensor& rows, const at::Tensor& received,
                             Operation& operation) = 0;

  // Collective. Operation::wait() calls `use` once, with rows that add up to the sum over ranks of
  // row `rank()` of their `rows`; not if that row is empty. An exchange may add rows itself as
  // `values` says, in fp32 and in an order that depends on the ranks and their machines alone.
  //   buffer  [reduction_bytes(rows, values)] of kByte on the device of `rows`; undefined for 0
  virtual SentBytes reduce(const Rows& rows, const at::Tensor& buffer, const RowValues& values,
                           UseRows use, Operation& operation) = 0;
  // Returns the size of the buffer that reduce() needs.
  virtual int64_t reduction_bytes(const Rows& rows, const RowValues& values) const = 0;

  // Collective. Row r of `rows` becomes rank r's own row, in place. Only each row need be
  // contiguous.
  //   before  what the own row held when all ranks had the same rows, where sends_changes();
  //           undefined, on all ranks, if rows are to be sent whole
  virtual SentBytes gather(const Rows& rows, const at::Tensor& before, Operation& operation) = 0;
  // Returns whether gather() can send what has changed in a row of this dtype and device.
  virtual bool sends_changes(c10::ScalarType /*dtype*/, c10::Device /*device*/) const {
    return false;
  }

  // Collective. In place: `values` has the result when the operation has received. `op` is SUM, MAX
  // or BOR.
  //   values  [n] contiguous
  virtual SentBytes all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                               Operation& operation) = 0;
  // Returns the payload that leaves this rank in an all_reduce().
  virtual int64_t all_reduce_bytes(const at::Tensor& values) const = 0;

  // Collective. In place: the values of rank `source` reach every rank.
  //   tensor  contiguous, of any shape
  virtual SentBytes broadcast(const at::Tensor& tensor, int source, Operation& operation) = 0;

  // Returns [bytes] of kByte in memory that rows are sent from without a copy; undefined if any
  // memory will do.
  virtual at::Tensor allocate(int64_t /*bytes*/) const { return {}; }
  // The device of values that all_reduce() takes fastest.
  virtual c10::Device device() const = 0;
  // Returns whether the host, and not a stream, waits for transfers of memory of this device.
  virtual bool waits_on_host(c10::Device /*device*/) const { return true; }
  // Puts what it starts on a device for which the host does not wait into an order with what other
  // exchanges start there. Before the first operation.
  virtual void follow(const std::shared_ptr<CollectiveOrder>& /*order*/) {}
  // Lets no backend choose the order in which reduce() adds up. Before the first operation.
  virtual void sum_in_rank_order() {}

  // Returns why the transport has failed without an operation that said so, as one does that
  // streams wait for; an empty text while all is well. Does not wait.
  struct Error {
    std::string text;
    bool timed_out = false;
  };
  virtual Error error() noexcept { return {}; }
  // Returns whether the connection to `rank`, of the communicator, is known to have ended. Does not
  // wait; called while an operation waits for that rank. Locks mutex() itself.
  virtual bool has_ended(int /*rank*/) noexcept { return false; }
  // Ends all operations under way, here and on the peers, or begins to. Locks mutex() itself.
  virtual void hang_up() noexcept = 0;
  // Ends the use of a transport without operations under way.
  virtual void shutdown() = 0;

 private:
  std::mutex mutex_;
};

// The ranks that one backend connects, as its communicator sees them.
struct BackendRanks {
  std::vector<int> names = {};     // the rank in the communicator of each rank; empty: the same
  bool over_links = false;         // ranks of different machines
  std::vector<int> machines = {};  // with over_links, that of each rank; empty: one for each
};

// An exchange over one backend.
class BackendExchange : public RowExchange {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // No operation of `backend` may wait longer than `timeout`.
  BackendExchange(BackendPtr backend, std::chrono::milliseconds timeout, BackendRanks ranks);

  c10::Device device() const override;
  void hang_up() noexcept override;
  void shutdown() override { backend_->shutdown(); }

 protected:
  c10d::Backend& backend() const { return *backend_; }
  const BackendPtr& backend_ptr() const { return backend_; }
  int rank() const { return backend_->getRank(); }
  int world_size() const { return backend_->getSize(); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  bool over_links() const { return ranks_.over_links; }
  int name_of(int peer) const { return ranks_.names.empty() ? peer : ranks_.names.at(peer); }
  // Counts what goes to `peer`, another rank.
  void add_sent(int peer, int64_t bytes, SentBytes& sent) const;
  // Returns the same number of bytes for each peer.
  SentBytes sent_to_each(int64_t bytes) const;
  // Returns the size of the rows for peers.
  SentBytes sent_rows(const Rows& rows) const;
  // Returns the size of the own row, which every peer sends in reduce() and receives in gather().
  int64_t own_bytes(const Rows& rows) const;
  // Returns the part of reduce()'s buffer for the rows of all ranks: [world_size, n].
  at::Tensor received_in(const at::Tensor& buffer, const Rows& rows) const;

 private:
  const BackendPtr backend_;
  const std::chrono::milliseconds timeout_;
  const BackendRanks ranks_;
  int64_t peers_on_links_ = 0;
};

// Returns the exchange for a backend that moves rows as `rows` says; null for one rank alone, which
// sends nothing.
std::shared_ptr<RowExchange> make_row_exchange(const c10::intrusive_ptr<c10d::Backend>& backend,
                                               RowTransport rows, std::chrono::milliseconds timeout,
                                               BackendRanks ranks = {});

// The exchanges that it chooses from beside PairwiseExchange, each in a file of its name.
std::shared_ptr<RowExchange> make_in_place_exchange(
    const c10::intrusive_ptr<SharedMemoryBackend>& backend, std::chrono::milliseconds timeout,
    BackendRanks ranks);
std::shared_ptr<RowExchange> make_whole_exchange(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                 std::chrono::milliseconds timeout,
                                                 BackendRanks ranks);

}  // namespace zero
