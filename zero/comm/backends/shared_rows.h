// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A transport for ranks of which some share a machine: between those, a row stays in shared memory.
// The sender announces where its row is; the receiver copies it or adds it up in place, and says
// that it has taken it. Both are notices in shared memory (row_notices.h). The transport underneath
// moves all other messages, and notices ranks that end.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace zero {

// Smaller messages are sent whole.
constexpr int64_t kSharedMessageBytes = 64 << 10;

// A Backend whose receiver can also read a row in the sender's memory. Made by share_memory().
// Thread safety: every member.
class SharedMemoryBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  // Returns whether rows of this many bytes from `peer` can be read in its memory.
  virtual bool reads(int peer, int64_t bytes) const = 0;

  // A row in the sender's memory, to be read between wait() and release().
  class Row : public c10d::Work {
   public:
    virtual const void* address() const = 0;
    // Says so to the sender, which waits for it. Throws c10::Error when the sender has ended and
    // its memory was given back meanwhile: zeros may have been read then.
    virtual void release() = 0;
  };
  // In place of recv(), whatever the sender does. Only where reads().
  virtual c10::intrusive_ptr<Row> receive_in_place(int64_t bytes, int from, int tag) = 0;
};

// Collective over the ranks of `under`, which must be new, move host memory, and serve send() and
// recv(). Returns `under` itself where this rank can share memory with no other, or is not
// `willing`, which may differ between ranks. Between two ranks that can read each other's
// SharedMemory, tensors of at least `least_bytes`, equal on all ranks, are read there; everything
// else goes to `under`. Tags must be below 2^30. Throws when the ranks do not answer
// within `timeout`.
//
// Rows in memory of allocateTensor() are read in place; others are copied into such memory first.
// As with any transport, neither side's tensor may be touched before its wait().
c10::intrusive_ptr<c10d::Backend> share_memory(const c10::intrusive_ptr<c10d::Backend>& under,
                                               std::chrono::milliseconds timeout, bool willing,
                                               int64_t least_bytes = kSharedMessageBytes);

}  // namespace zero
