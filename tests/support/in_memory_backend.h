// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Transports of our own for tests.
//
//   MemoryNetwork   ranks are threads of this process and hand tensors to each other: counts what
//                   they send, delays, loses and breaks things on request, obeys timeouts, and is
//                   clean under ThreadSanitizer because all of it is our own code. With kWhole it
//                   has sections as NCCL: of one, only the Work of its end can be waited for.
//   make_simulated_backend   claims thousands of ranks in one thread and moves no data.
//
// They implement the operations that the exchanges of zero/comm call and no others.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "zero/process_group.h"

namespace zero {

enum class MemoryOp {
  kSend,
  kReceive,
  kAllReduce,
  kBroadcast,
  kAllGather,
  kAllToAll,
  kReduceScatter,
  kSection
};
constexpr size_t kMemoryOps = 8;

// Ranks are those of the job (Group::global_rank()), whatever subgroup they talk in.
// Thread safety: every member.
class MemoryNetwork {
 public:
  // Its backends stand for Gloo, or, with kWhole, for NCCL.
  explicit MemoryNetwork(RowTransport rows = RowTransport::kPairwise);
  ~MemoryNetwork();

  // For the Group of rank `rank`. The ranks of a communicator find each other through the store.
  BackendFactory factory(int rank);

  // Payload that `rank` handed over for others, by operation, over all communicators.
  struct Counts {
    std::array<int64_t, kMemoryOps> calls{};
    std::array<int64_t, kMemoryOps> bytes_sent{};
    int64_t calls_of(MemoryOp op) const { return calls[static_cast<size_t>(op)]; }
    int64_t bytes_of(MemoryOp op) const { return bytes_sent[static_cast<size_t>(op)]; }
  };
  Counts counts(int rank) const;
  // Sections that were begun and not ended, on all ranks.
  int open_sections() const;
  // From now on, no backend has sections.
  void leave_out_sections();

  // From now on, what `rank` contributes to `op` arrives `by` later.
  void delay(int rank, MemoryOp op, std::chrono::milliseconds by);
  // From now on, what `rank` hands over leaves one piece after another, at this many bytes a
  // second; 0: at once.
  void limit_rate(int rank, double bytes_per_second);
  // Of what `rank` sends from now on, the first `sends` arrive, and the rest does when release() is
  // called.
  void hold_after(int rank, int sends);
  void release(int rank);
  // What `rank` contributes to its next `op` is lost, without an error on its side.
  void drop_next(int rank, MemoryOp op);
  // The rank is dead: its calls and waits throw, and so do waits for something it did not send.
  void kill(int rank);
  // The same, as soon as it makes its `calls`-th next call of `op` (1: the next one).
  void kill_at(int rank, MemoryOp op, int calls);
  // All ranks are dead.
  void stop();

 private:
  friend class MemoryBackend;
  struct State;
  std::shared_ptr<State> state_;
};

// Rank `rank` of `world_size`, alone; for RowTransport::kWhole. Operations succeed at once and
// leave what they would receive as it was (a reduced row is the own one), except that texts and
// lengths (bytes and int64) gathered from the other ranks equal the own: a simulated job consists
// of equal ranks.
c10::intrusive_ptr<c10d::Backend> make_simulated_backend(int rank, int world_size);

}  // namespace zero
