// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The algorithms that bring rows to their ranks, one file each. A new one derives from RowExchange,
// or from the one that it differs from, and is chosen in row_exchange.cc.
// tests/comm/row_exchange_test.cc holds all of them to the contract below.
//
// Each collective method starts an operation and does not block: it adds the sends, the receives
// and the actions that follow them to `operation`, which blocks later and names the ranks that are
// missing. It returns the bytes that leave this rank, and throws if it cannot start.
//
// `rows` is a contiguous matrix [world_size, n] of any dtype with at least one element. The caller
// leaves all tensors alone until the operation ends; the exchange keeps them alive until then.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "zero/comm/operation.h"
#include "zero/communicator.h"

namespace zero {

// An exchange belongs to one backend. Thread safety: the caller of a collective method holds
// mutex().
class RowExchange : public std::enable_shared_from_this<RowExchange> {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

  // No operation of `backend` may wait longer than `timeout`.
  RowExchange(BackendPtr backend, std::chrono::milliseconds timeout);
  virtual ~RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  // Orders the calls of the backend: backends number their calls without locks, and tags must be
  // given out in the order of the calls. Actions that start transfers in Operation::wait() lock it.
  std::mutex& mutex() { return mutex_; }

  // Collective. Row r of `received` becomes row `rank()` of rank r's `rows`. The own row of
  // `received` is unspecified.
  //   received  like `rows`, and apart from it
  virtual int64_t exchange(const at::Tensor& rows, const at::Tensor& received,
                           Operation& operation) = 0;

  // Collective. Operation::wait() calls `use` once, with rows that add up to the sum over ranks of
  // row `rank()` of their `rows`. An exchange may add rows of fp32, bf16 and fp16 itself, in fp32
  // and in an order that depends on the ranks alone; rows of other dtypes arrive as they were sent,
  // in rank order.
  //   buffer  [reduction_bytes(rows)] of kByte on the device of `rows`; undefined for 0 bytes
  virtual int64_t reduce(const at::Tensor& rows, const at::Tensor& buffer, UseRows use,
                         Operation& operation) = 0;
  // Returns the size of the buffer that reduce() needs.
  virtual int64_t reduction_bytes(const at::Tensor& rows) const = 0;

  // Collective. Row r of `rows` becomes rank r's own row, in place.
  virtual int64_t gather(const at::Tensor& rows, Operation& operation) = 0;

  // Collective. In place. `op` is SUM, MAX or BOR; sums are in rank order unless the backend adds.
  //   values  [n] contiguous
  virtual int64_t all_reduce(const at::Tensor& values, c10d::ReduceOp::RedOpType op,
                             Operation& operation) = 0;

  // Collective. In place: the values of rank `source` reach every rank.
  //   tensor  contiguous, of any shape
  virtual int64_t broadcast(const at::Tensor& tensor, int source, Operation& operation) = 0;

  // Returns [bytes] of kByte in memory that rows are sent from without a copy; undefined if any
  // memory will do.
  virtual at::Tensor allocate(int64_t bytes) const;

  // Ends all operations under way, here and on the peers. Locks mutex() itself.
  virtual void hang_up() noexcept;

 protected:
  c10d::Backend& backend() const { return *backend_; }
  int rank() const { return backend_->getRank(); }
  int world_size() const { return backend_->getSize(); }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  const BackendPtr backend_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
};

// Returns the exchange for a backend that moves rows as `rows` says; null for one rank alone, which
// sends nothing.
std::shared_ptr<RowExchange> make_row_exchange(const RowExchange::BackendPtr& backend,
                                               RowTransport rows,
                                               std::chrono::milliseconds timeout);

}  // namespace zero
