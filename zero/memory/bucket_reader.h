// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What still reads the shard of the last step while the next step begins to change it: the copies
// of an asynchronous save or of a protected step.
#pragma once

#include <cstdint>

namespace zero {

class BucketReader {
 public:
  virtual ~BucketReader() = default;
  // Blocks until the buckets from `bucket` on are read. A step changes the last bucket first.
  virtual void wait(int64_t bucket) = 0;
};

}  // namespace zero
