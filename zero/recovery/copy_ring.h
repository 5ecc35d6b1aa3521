// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Each rank's connections for copies: to its backup rank, which keeps a copy of its shard, and from
// its primary, whose shard it keeps.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/checkpoint/memory_file.h"
#include "zero/process_group.h"

namespace zero {

// Returns the backup rank of each rank: another one, on another machine where there is one; each
// rank has one primary. With m ranks on the largest machine, ranks in the order of
// machines pass their copies m places on. If more than half of all ranks share that machine, 2 m -
// W of them keep their copies on it.
std::vector<int> backup_ranks(const Topology& topology);

class CopyRing {
 public:
  // Collective over `group`, of at least two ranks.
  explicit CopyRing(const Group& group);

  // The rank whose shard this one keeps.
  int primary() const { return primary_; }

  // Collective; on any thread, one call at a time. Sends `own`, receives the primary's file and
  // verifies its checksums. Throws c10::Error, and is unusable from then on. Sends the file, about
  // 200 bytes for each of its pieces, and 16 bytes.
  MemoryFile exchange(const MemoryFile& own,
                      const std::function<at::Tensor(int64_t bytes)>& allocate);

  // Makes an exchange() under way fail here and, where they wait for this rank, on the other two. A
  // rank whose exchange() failed calls it, since the one beyond it may wait for it in turn.
  void abort(const std::string& reason) noexcept;
  // Whether an exchange() waits for other ranks.
  bool is_waiting() const { return waiting_; }
  // What this rank sent.
  Traffic traffic() const;

 private:
  // Sends `out` and receives `in`; either may be undefined.
  void pass(const at::Tensor& out, const at::Tensor& in, const std::string& label);

  int primary_ = 0;
  std::atomic<bool> waiting_ = false;
  std::unique_ptr<Communicator> to_backup_;     // rank 0 is the primary, rank 1 the backup
  std::unique_ptr<Communicator> from_primary_;  // the same
};

}  // namespace zero
