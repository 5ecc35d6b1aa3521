// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What still reads the shard of the last step while the next step begins to change it: the copies
// of an asynchronous save or of a protected step.
#pragma once

#include <cstdint>

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

}  // namespace zero
