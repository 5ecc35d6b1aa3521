// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Keeps this rank's shard of every protected step also in another rank's memory, in the background.
//
// A snapshot is complete on a rank when its own file is copied, sent, and the primary's file has
// arrived with the right checksum; only then is it added. A failure of the communication before the
// copies are made leaves it out: where streams wait for collectives and not the host, their end may
// have been an abort, and the state that was copied is no step's. The one before is freed when all
// ranks have agreed on a call that each of them began with a finish() without a problem. So at any
// time all ranks have one snapshot in common.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "zero/agreement/control_channel.h"
#include "zero/base/serial_thread.h"
#include "zero/checkpoint/memory_file.h"
#include "zero/recovery/copy_ring.h"
#include "zero/recovery/snapshots.h"

namespace zero {

class Protection {
 public:
  // Collective over `group`. `recovery` is the number of recoveries before it. `failed()`, which
  // any thread may call, returns how the communication of the steps failed; empty if it did not.
  Protection(const Group& group, std::shared_ptr<Snapshots> snapshots, int64_t recovery,
             std::function<std::string()> failed);
  // Aborts what is under way.
  ~Protection();

  // Waits until the last snapshot is complete here. Returns why it is not, or nothing. Then it has
  // ended the waits of the two ranks that exchange copies with this one.
  Problem finish();
  // Collective, after all ranks agreed that finish() had no problem. Starts the next snapshot.
  // `file` has views of the shard. Returns the copies, which must be waited for before a bucket is
  // changed. Null if nothing protects.
  std::shared_ptr<ShardCopies> begin(Manifest manifest, FileToSave file);
  // Frees all but the newest snapshot. After an agreement as for begin().
  void keep_newest() { snapshots_->keep_newest(); }

  void abort(const std::string& reason) noexcept;
  int64_t held_bytes() const { return snapshots_->bytes(); }
  Traffic traffic() const { return ring_ ? ring_->traffic() : Traffic(); }

 private:
  // On the thread.
  void complete(Snapshot& snapshot, MemoryFileWriter& writer);

  const std::shared_ptr<Snapshots> snapshots_;
  const int64_t recovery_;
  const Group group_;
  const std::function<std::string()> failed_;
  const bool others_may_join_;      // and need what one rank alone keeps for them
  std::unique_ptr<CopyRing> ring_;  // null for one rank alone, which nothing protects
  int64_t begun_ = 0;
  std::future<Problem> made_;  // the problem of the snapshot under way
  Problem problem_;
  SerialThread thread_{"copies"};  // the last member: it ends first
};

}  // namespace zero
