// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Snapshots: the protected steps that this rank could give back, each with the shards of it that
// this rank holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zero/checkpoint/format/reader.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/process_group.h"

namespace zero {

// One protected step.
struct Snapshot {
  // The same on all ranks: the recoveries before it, and its number in its group.
  int64_t recovery = 0;
  int64_t number = 0;
  int world_size = 0;               // of the group that made it
  Manifest manifest;                // without files
  std::map<int, MemoryFile> files;  // by rank of that group; all of them are complete

  // Equal on all ranks, for file headers.
  std::string id() const { return std::to_string(recovery) + "." + std::to_string(number); }
};

// Thread safety: every member.
class Snapshots {
 public:
  // Adds one that is complete on this rank, and newer than all others.
  void add(Snapshot snapshot);
  // Frees all but the newest. Only where all ranks have that one.
  void keep_newest();
  std::vector<std::shared_ptr<const Snapshot>> all() const;
  // Host memory for a file whose tensors are copied from `device`: that of such a file that was
  // freed, or new.
  at::Tensor allocate(int64_t bytes, c10::Device device);
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<const Snapshot>> list_;  // the newest last
  std::vector<MemoryFile> spare_;
};

// What a rank holds, as text for the others, and what they can put together from it.
std::string snapshots_text(const Snapshots& snapshots);

struct CompleteSnapshot {
  int64_t recovery = 0;
  int64_t number = 0;
  std::vector<int> servers;  // for each file, by number: the index of the rank that has it
};
// The newest snapshot of which some rank has each file; `texts` are those of snapshots_text(), by
// rank. Throws c10::Error, which says which shards are lost, if there is none.
CompleteSnapshot newest_complete(const std::vector<std::string>& texts);

// Collective over `control` and `group`, whose ranks are those that gave their snapshots_text().
// Returns a reader of the snapshot that `which` names, with the tensors for which needed(tensor) is
// true on this rank. Those of files that this rank does not hold are sent by the servers of the
// files: see exchange_files().
std::unique_ptr<CheckpointReader> gather_snapshot(
    Communicator& control, const Group& group, const Snapshots& snapshots,
    const CompleteSnapshot& which, const std::function<bool(const ManifestTensor&)>& needed);

}  // namespace zero
