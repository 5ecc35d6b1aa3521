// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The copies of a shard that an asynchronous save or a protected step makes while training goes on.
// A thread copies the tensors of one bucket after the other, in the order in which step() changes
// them. A step that is about to change a bucket which is not copied yet copies the rest of it
// itself: it waits for the end of a piece at most. So a thread that copies must have the priority
// of a step. Memory of a device is copied on a stream, for which that of the step waits.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "zero/checkpoint/stream_copies.h"
#include "zero/memory/bucket_reader.h"

namespace zero {

// Thread safety: every member, copy_all() by one thread at a time.
class ShardCopies : public BucketReader {
 public:
  // Enqueues the copies from a device, and copies nothing of the host yet.
  explicit ShardCopies(const std::vector<ShardCopy>& copies);

  // Copies what is left, and waits for what other threads and the device are copying. Throws what
  // went wrong in any of them; then nothing more of the host is copied, or waited for.
  void copy_all();

  // Blocks until the tensors of buckets from `bucket` on are copied, and makes the current stream
  // wait for those of the device. Copies what is left of those of the host.
  void wait(int64_t bucket, OwnThreadWait& limit) override;

 private:
  struct Piece {
    at::Tensor from, to;
    int64_t begin = 0, bytes = 0;
    int64_t bucket = 0;
  };
  // Copies the next piece. `lock` is held, but not meanwhile.
  void copy_next(std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Piece> pieces_;  // in the order in which they are copied; none when all are
  size_t next_ = 0;
  std::set<size_t> running_;
  std::exception_ptr problem_;
  std::optional<StreamCopies> of_device_;
};

}  // namespace zero
