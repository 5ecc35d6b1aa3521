// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Each rank's connections for copies: to the rank that keeps a copy of its shard, and from the rank
// whose shard it keeps.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/checkpoint/memory_file.h"
#include "zero/process_group.h"

namespace zero {

// Returns for each rank the one that keeps its copy: another one, on another machine where there is
// one; each rank keeps one copy. With m ranks on the largest machine, ranks in the order of
// machines pass their copies m places on. If more than half of all ranks share that machine, 2 m -
// W of them keep their copies on it.
std::vector<int> copy_holders(const Topology& topology);

class CopyRing {
 public:
  // Collective over `group`, of at least two ranks.
  explicit CopyRing(const Group& group);

  // The rank whose shard this one keeps.
  int source() const { return source_; }

  // Collective; on any thread, one call at a time. Sends `own`, receives the source's file and
  // verifies its checksums. Throws c10::Error, and is unusable from then on. Sends the file, about
  // 200 bytes for each of its pieces, and 16 bytes.
  MemoryFile exchange(const MemoryFile& own,
                      const std::function<at::Tensor(int64_t bytes)>& allocate);

  // Makes an exchange() under way fail here and on the other two ranks.
  void abort(const std::string& reason) noexcept;
  // Whether an exchange() waits for other ranks.
  bool is_waiting() const { return waiting_; }
  // What this rank sent.
  Traffic traffic() const;

 private:
  // Sends `out` and receives `in`; either may be undefined.
  void pass(const at::Tensor& out, const at::Tensor& in, const std::string& label);

  int source_ = 0;
  std::atomic<bool> waiting_ = false;
  std::unique_ptr<Communicator> to_holder_;    // rank 0 is the owner, rank 1 the holder
  std::unique_ptr<Communicator> from_source_;  // the same
};

}  // namespace zero
