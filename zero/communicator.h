// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The one door to c10d: everything that can block on another rank goes through
// a Communicator, so reading zero/comm is enough to know what is sent.
//
// Rules that hold for every call:
//   - All ranks of the group make the same calls in the same order, with equal
//     sizes and dtypes. The callers guarantee it (plan fingerprint, control
//     message); Gloo would abort the process otherwise and NCCL would hang.
//   - Nothing waits without a timeout. A failure throws CommunicationError
//     (zero/errors.h) that names the operation, its label, the peer where it is
//     known, this rank and the group. The communicator is unusable afterwards
//     (`failed()`).
//   - CPU tensors: the call returns at once and Pending::wait() blocks the
//     calling thread. CUDA tensors over NCCL: work is enqueued behind the
//     current stream, and Pending::wait() makes the stream that is current at
//     that time wait, never the host; NCCL's own watchdog enforces the timeout.
//     CUDA tensors over Gloo: staged through pinned host memory, so that the
//     call waits for the current stream.
//   - A communicator of one rank sends nothing: every operation succeeds at
//     once, and its Pending is valid to wait for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/errors.h"

// Not its header, which costs every file that includes this one ten seconds.
namespace c10d {
class Backend;
}

namespace zero {

// Calls and bytes this rank handed to the transport for its peers since
// construction. `bytes_sent` counts payload that leaves this rank: what a
// backend moves inside one rank is not counted, and an operation whose
// algorithm is the backend's own is counted by the formula given beside it.
struct Traffic {
  int64_t exchange_calls = 0;
  int64_t exchange_bytes_sent = 0;  // exchange_rows, and sums of gradients
  int64_t gather_calls = 0;
  int64_t gather_bytes_sent = 0;  // gather_rows
  int64_t small_calls = 0;
  int64_t small_bytes_sent = 0;  // all_reduce_*, broadcast, all_gather_text
  int64_t link_bytes_sent = 0;   // of all these bytes, those for ranks of other machines
};

// How a backend moves the rows of a matrix best.
enum class RowTransport {
  kPairwise,  // A send and a receive per peer, in host memory: Gloo.
  kWhole,     // One collective of its own for each operation: NCCL.
};

// An operation under way. wait() must be called exactly once, before the
// tensors are read or written; they are kept alive until then. The time limit
// runs from the call of wait(), since a rank may start early and compute on; in
// two levels the first has a limit of its own, from when its turn comes.
// With a pairwise transport a rank passes on within wait() what broadcast(), and all_reduce_*() of
// more than 8 ranks, send by way of it: so all ranks wait in one order, and one that computes
// before it waits holds up others.
// Dropping a Pending of several ranks without waiting leaves the peers' data on
// the wire, so the communicator counts as failed from then on.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::function<void()> wait) : wait_(std::move(wait)) {}
  bool valid() const { return static_cast<bool>(wait_); }
  // Throws CommunicationError when the operation failed or timed out, and another c10::Error where
  // this rank's own part of it did, as for lack of memory.
  void wait() {
    if (auto wait = std::move(wait_)) {
      wait_ = nullptr;
      wait();
    }
  }

 private:
  std::function<void()> wait_;
};

// One process group, used by one owner. Not copyable. Thread safety: calls may
// come from different threads as long as the callers order them, the same way on
// every rank; a Pending may be waited for on another thread than the one that
// started it, while further operations start.
class Communicator {
 public:
  // `name` appears in errors. `timeout` bounds every wait of this communicator.
  // A null `backend` stands for one rank alone. `rows` must be equal on all ranks.
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string name,
               std::chrono::milliseconds timeout, RowTransport rows = RowTransport::kPairwise);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int world_size() const;
  const std::string& name() const;
  // A snapshot; nothing is counted for a communicator of one rank.
  Traffic traffic() const;

  // The reason of the first failure; empty while the communicator is usable.
  // Every later call throws with this text instead of sending.
  std::string failed() const;
  std::chrono::milliseconds timeout() const;

  // Collective. Sends row r of `rows` to rank r and receives into row r of
  // `received` what rank r sent here. The own row of `received` is unspecified
  // afterwards: read it from `rows`. Sends (W-1)/W of `rows`. With a
  // pairwise transport this rank takes nothing before wait(): so ranks that exchange over
  // several communicators must wait in one order on all of them.
  //   rows      [world_size, n] contiguous, any dtype; unchanged
  //   received  [world_size, n] contiguous, same dtype; must not alias `rows`
  // `label` names the operation in errors, for example "bucket 3".
  Pending exchange_rows(const at::Tensor& rows, const at::Tensor& received,
                        const std::string& label);

  // Collective. Fills row r of `rows` with rank r's row r, in place: the own
  // row is input and keeps its value, the others are output. Sends W-1 times a
  // row; in two levels H-1 times a row to other machines and H times L-1 within its own.
  //   rows  [world_size, n] contiguous, any dtype
  Pending gather_rows(const at::Tensor& rows, const std::string& label);

  // Collective. In place. `values` is 1-D, contiguous and small. Sums are for double; the
  // maximum is for int64 and int32 only, since a float maximum loses NaN
  // on Gloo; the bitwise OR is for int32. All ranks get the same bits. Sums are in rank order up to
  // 8 ranks, pairwise in a tree beyond, and in two levels within a machine first; NCCL has an order
  // of its own. With a pairwise transport (Gloo) up to 8 ranks exchange all values, so that a rank
  // that is missing is named, counted as W-1 times their bytes; more take log2(W) steps. On NCCL,
  // which has no OR, counted as 2(W-1)/W.
  Pending all_reduce_sum(const at::Tensor& values, const std::string& label);
  Pending all_reduce_max(const at::Tensor& values, const std::string& label);
  Pending all_reduce_or(const at::Tensor& values, const std::string& label);

  // Collective. In place: rank `source`'s values reach every rank. Counted as
  // (W-1) times its bytes on the source and nothing elsewhere.
  Pending broadcast(const at::Tensor& tensor, int source, const std::string& label);

  // Collective, blocks. Returns every rank's text, in rank order; the lengths may differ.
  // For construction and errors, not for the step path: it sends the lengths and then the texts
  // padded to the longest, W-1 times each, and counts as two small calls. If more than a quarter
  // would be padding, it pads the first 4 KiB alone, and broadcasts the rest of each longer text,
  // a small call each.
  std::vector<std::string> all_gather_text(const std::string& text, const std::string& label);

  // Stops using the backend and closes its connections, so that operations pending
  // here and on the peers fail now and not at their timeouts. `reason` becomes failed(), unless
  // there is one. Never throws. A failed operation does this by itself.
  void abort(const std::string& reason) noexcept;
  // `action` runs once, at the first failure, with its reason: before the connections are closed,
  // on the thread that saw it. It must not throw. To be set before the first operation. A former
  // one does not run any more when the call returns.
  void on_failure(std::function<void(const std::string& reason)> action);

 private:
  friend class RowCommunicator;  // zero/comm/row_communicator.h: what zero itself needs beside
  struct Impl;
  explicit Communicator(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace zero
