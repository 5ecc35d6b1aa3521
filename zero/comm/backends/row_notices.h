// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What two ranks of a machine say to each other about rows in their shared memory: that a row is
// there, and that it has been taken.
//
// A rank writes its notices into memory of its own, and waits by a futex for a change of the
// peer's. So no socket, and no other thread of either process, is between a row and the one that
// waits for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "zero/comm/backends/shared_memory.h"

namespace zero {

// Thread safety: every member, once connected.
class RowNotices {
 public:
  // So many rows may be announced that the peer has not taken.
  static constexpr uint64_t kSlots = 2048;

  // A row that the peer has announced.
  struct Row {
    uint64_t number = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  // Where the peer finds the notices of this rank. Plain bytes, to be sent as they are.
  struct Address {
    int64_t offset = 0;    // in the shared memory of this rank; 0: there are none
    int64_t password = 0;  // random, at their beginning
  };
  // The kinds of notices are counted and waited for apart.
  enum class Kind { kAnnounced, kTaken };

  // Null when `memory` has no room.
  static std::unique_ptr<RowNotices> make(const std::shared_ptr<SharedMemory>& memory);
  // Says that no notices follow. What this rank has said stays until the peer says so too, or its
  // memory has been given back.
  ~RowNotices();
  RowNotices(const RowNotices&) = delete;
  RowNotices& operator=(const RowNotices&) = delete;

  Address address() const;
  // Returns false when this rank cannot read the peer's notices, or not wait for them.
  bool connect(std::shared_ptr<PeerMemory> peer, Address theirs);

  // Returns whether announce() may be called: the peer has taken a row of kSlots before.
  bool has_slot() const;
  // Returns the number of the row. Its tag may be used again for a row that is announced after it.
  uint64_t announce(int tag, int64_t offset, int64_t bytes);
  // Says that row `number` of the peer has been taken.
  void take(uint64_t number) noexcept;
  // Says that no notices follow. Nothing in a process that was forked later.
  void close() noexcept;

  // Returns the first row of this tag that has not been returned; nothing if there is none yet.
  std::optional<Row> find(int tag);
  // Returns whether the peer has taken row `number` of this rank.
  bool is_taken(uint64_t number) const;
  // Returns whether the peer says that no notices follow, or its memory has been given back.
  bool is_closed() const;

  // Returns a number that changes with each notice of the peer of this kind.
  uint32_t count(Kind kind) const;
  // Returns when count(kind) is not `seen`, after wake(), after `limit`, or for no reason.
  void wait(Kind kind, uint32_t seen, std::chrono::milliseconds limit) const;
  // Ends the waits of this process.
  void wake() const noexcept;

 private:
  struct Page;
  // The notices of the peer.
  struct Peer {
    std::shared_ptr<PeerMemory> memory;
    const Page* page = nullptr;
    int64_t password = 0;
    bool is_closed() const;
  };
  struct Left;

  explicit RowNotices(at::Tensor memory);

  at::Tensor memory_;  // that of *own_
  Page* own_;
  int64_t offset_ = 0;
  const int64_t process_;
  Peer peer_;

  mutable std::mutex mutex_;         // guards what follows
  uint64_t announced_ = 0;           // by this rank
  uint64_t read_ = 0;                // rows of the peer that have reached arrived_
  std::multimap<int, Row> arrived_;  // by tag
};

}  // namespace zero
