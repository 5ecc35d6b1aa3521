// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The copies of a shard that an asynchronous save makes while training goes on. Its thread copies
// the tensors of one bucket after the other, in the order in which step() changes them; a step
// waits for a bucket that it is about to change and that is not copied yet.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "zero/checkpoint/writer.h"

namespace zero {

// Thread safety: every member.
class ShardCopies {
 public:
  // Buckets 0 to `buckets` - 1, the last of which is copied and changed first.
  explicit ShardCopies(int64_t buckets) : first_copied_(buckets) {}

  // Replaces the tensors of `file` by copies in host memory; bucket_of[i] is the bucket of tensor
  // i, or kOfNone for one that nothing changes. Once. If it throws, nothing waits any more.
  static constexpr int64_t kOfNone = -1;
  void copy(FileToSave& file, const std::vector<int64_t>& bucket_of);
  // The same with copy_tensor(i) in place of the copy of tensor i, for all but those of kOfNone.
  void copy_each(const std::vector<int64_t>& bucket_of,
                 const std::function<void(size_t tensor)>& copy_tensor);

  // Blocks until the tensors of buckets from `bucket` on are copied.
  void wait(int64_t bucket);
  void wait_for_all() { wait(0); }

 private:
  void set_first_copied(int64_t bucket);

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t first_copied_;
};

}  // namespace zero
