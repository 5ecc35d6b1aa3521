// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A transport for ranks of which some are on one machine: between those, rows do not travel through
// sockets. The sender says where its row is; the receiver copies it from there or adds it up in
// place, and says when it is done. What is said are messages of the transport underneath, which
// also notices ranks that end.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <chrono>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace zero {

// Smaller messages are sent, which costs less than to say where they are.
constexpr int64_t kSharedMessageBytes = 64 << 10;

// What share_memory() makes: a Backend that can also leave rows where they are. Thread safety:
// every member.
class SharedMemoryBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  // Whether rows of this many bytes from `peer` can be read where they lie.
  virtual bool reads(int peer, int64_t bytes) const = 0;

  // A row that is read there: between wait() and release().
  class Row : public c10d::Work {
   public:
    virtual const void* address() const = 0;
    // Tells the sender, who waits for it.
    virtual void release() noexcept = 0;
  };
  // In place of recv(), whatever the sender does. Only where reads().
  virtual c10::intrusive_ptr<Row> receive_in_place(int64_t bytes, int from, int tag) = 0;
};

// Collective over the ranks of `under`, which must be new, move host memory, and serve send() and
// recv(). Returns `under` itself where this rank can share memory with no other, or is not
// `willing`, which may differ between ranks. Between two ranks that can read each other's
// SharedMemory, tensors of at least `least_bytes`, equal on all ranks, travel through it;
// everything else goes to `under`. Tags must be below 2^30. Throws when the ranks do not answer
// within `timeout`.
//
// Rows are read where they are when they lie in memory of allocateTensor(), and copied there first
// when they do not. As with any transport, neither side's tensor may be touched before its wait().
c10::intrusive_ptr<c10d::Backend> share_memory(const c10::intrusive_ptr<c10d::Backend>& under,
                                               std::chrono::milliseconds timeout, bool willing,
                                               int64_t least_bytes = kSharedMessageBytes);

}  // namespace zero
