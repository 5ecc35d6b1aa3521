// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What still reads the shard of the last step while the next step begins to change it: the copies
// of an asynchronous save or of a protected step.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/base/own_thread_wait.h"

namespace zero {

class BucketReader {
 public:
  virtual ~BucketReader() = default;
  // Blocks until the buckets from `bucket` on are read, or makes the current stream wait for that,
  // where a stream reads and changes them. A step changes the last bucket first.
  // Throws c10::Error when `limit` says that the thread that reads stands still.
  virtual void wait(int64_t bucket, OwnThreadWait& limit) = 0;
};

// All that read the shard as it is now.
class BucketReaders {
 public:
  // `rank` begins errors, as "rank 1 of 4" does. A thread that has copied
  // nothing for `limit` stands still, and wait() throws.
  BucketReaders(std::string rank, std::chrono::milliseconds limit)
      : rank_(std::move(rank)), limit_(limit) {}

  void add(std::shared_ptr<BucketReader> reader) {
    readers_.push_back(std::move(reader));
    if (replays_) wait(0);
  }
  // As BucketReader::wait(), for all of them.
  void wait(int64_t bucket) {
    if (readers_.empty()) return;
    OwnThreadWait limit(
        rank_ + " waits for its thread that copies the shard for a save or a protected step",
        limit_);
    for (const auto& reader : readers_) reader->wait(bucket, limit);
    if (bucket == 0) forget();
  }
  // The shard has changed: all of them have been waited for.
  void forget() { readers_.clear(); }
  // From now on a CUDA graph may change the shard without asking, behind what the current stream
  // has to do.
  void expect_replays() { replays_ = true; }

 private:
  const std::string rank_;
  const std::chrono::milliseconds limit_;
  std::vector<std::shared_ptr<BucketReader>> readers_;
  bool replays_ = false;
};

}  // namespace zero
