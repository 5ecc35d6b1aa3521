// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The ranks that share memory with this one: where their rows are, and what they say about them.
#pragma once

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "zero/comm/backends/connection_watch.h"
#include "zero/comm/backends/row_notices.h"
#include "zero/comm/backends/shared_memory.h"

namespace zero {

// Thread safety: every member. What waits throws c10::Error when `timeout` is over, when the peer
// has ended, and after stop().
class SharedPeers {
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

 public:
  // Collective over the ranks of `under`. Null where no other rank shares memory with this one.
  //   memory  of this rank; null: this rank shares none
  static std::unique_ptr<SharedPeers> find(const BackendPtr& under,
                                           const std::shared_ptr<SharedMemory>& memory,
                                           std::chrono::milliseconds timeout);

  // Gives back the memory of peers that have ended, which communicators that nobody uses keep.
  ~SharedPeers();

  // Locked for calls of `under`: backends number their calls without locks.
  std::mutex& calls() { return calls_; }
  bool shares(int peer) const { return peers_[peer].notices != nullptr; }

  // Says that a row is at `offset` of this rank's memory, or that the peer gets it otherwise.
  // Returns its number. Waits while RowNotices::kSlots rows are announced that the peer has not
  // taken.
  uint64_t announce(int to, int tag, int64_t offset, int64_t bytes);
  // Returns when the peer has taken row `number`.
  void await_taken(int by, uint64_t number, std::chrono::milliseconds timeout);

  // Returns the next row of this tag once the peer has announced it. Throws when it has another
  // size.
  RowNotices::Row await_row(int from, int tag, int64_t bytes, std::chrono::milliseconds timeout);
  const void* at(int from, const RowNotices::Row& row) const;
  // Says that a row of the peer has been taken. Throws when its memory was given back meanwhile: it
  // may have been read as zeros then.
  void take(int from, uint64_t number);

  bool is_stopped() const { return stop_; }
  // Ends all waits, here and at the peers.
  void stop() noexcept;

 private:
  struct Peer {  // nulls: does not share
    std::shared_ptr<PeerMemory> memory;
    std::unique_ptr<RowNotices> notices;
  };

  SharedPeers(const BackendPtr& under, std::vector<Peer> peers, std::chrono::milliseconds timeout);
  // Returns once `ready`, which notices of this kind make true.
  void await(int peer, RowNotices::Kind kind, std::chrono::milliseconds timeout,
             c10::function_ref<bool()> ready);

  const BackendPtr under_;
  const std::vector<Peer> peers_;
  const std::chrono::milliseconds timeout_;
  std::mutex calls_;
  ConnectionWatch watch_;
  std::mutex announce_mutex_;
  std::atomic<bool> stop_{false};
};

}  // namespace zero
