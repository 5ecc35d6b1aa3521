// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The copies of a shard that an asynchronous save or a protected step makes while training goes on.
// A thread copies the tensors of one bucket after the other, in the order in which step() changes
// them. A step that is about to change a bucket which is not copied yet copies the rest of it
// itself: it waits for the end of a piece at most. So a thread that copies must have the priority
// of a step. Memory of a device is copied on a stream, for which that of the step waits. And the
// host memory for the copies, which is written once from beginning to end.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "zero/base/own_thread_wait.h"
#include "zero/memory/bucket_reader.h"

namespace zero {

struct ShardCopy {
  at::Tensor from;     // any device and strides
  at::Tensor to;       // the bytes of its elements in order: kByte, contiguous, in host memory
  int64_t bucket = 0;  // or kOfNoBucket; a step changes the last one first
};

// The device from which a stream copies: that of the shard, if it has one. Whole tensors beside it
// may be on others. The CPU where no stream copies.
c10::Device stream_device(const std::vector<ShardCopy>& copies);

// Copies of a shard from a device to host memory, on a stream beside the one that trains:
//
//   current stream   last step -- next forward and backward pass -- change bucket 1 -- change 0
//                             \                                   /                  /
//   copy stream                copy bucket 1 -------------------- copy bucket 0 ----
//
// The host waits for none of this except in captures; the thread that reads the copies does.
//
// Thread safety: wait() beside all others.
class StreamCopies {
 public:
  // Enqueues all copies, from one device that has streams, behind what its current stream has to do
  // now. They come in the order of buckets, the last one first. Those of kOfNoBucket are enqueued
  // on the current stream, which need not wait for earlier copies of others then.
  explicit StreamCopies(const std::vector<ShardCopy>& copies);
  // Waits for copies under way, which use memory of others.
  ~StreamCopies();
  StreamCopies(const StreamCopies&) = delete;
  StreamCopies& operator=(const StreamCopies&) = delete;

  // Makes the current stream wait for the copies of buckets from `bucket` on. In a capture, which
  // can wait for nothing outside of it, the host waits, and throws as `limit` says.
  void wait(int64_t bucket, OwnThreadWait& limit) const;
  // Blocks until all is copied, and frees what was copied.
  void finish();

 private:
  struct Copied {
    int64_t bucket = 0;
    c10::Event event;  // behind its copies
  };

  using Iterator = std::vector<ShardCopy>::const_iterator;

  explicit StreamCopies(c10::Device device);
  // Enqueues these, and records an event behind those of each bucket.
  void enqueue(Iterator begin, Iterator end, const c10::Stream& stream);

  const c10::Stream stream_;
  std::vector<ShardCopy> under_way_;  // kept until they are made
  std::vector<Copied> copied_;        // the last bucket first; does not change once all is enqueued
};

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

// Returns [bytes] of kByte in host memory that nothing has been written to. A large block has huge
// pages where the system gives them to who asks: with small ones the first write to a page takes
// three times as long as the copy, and delays those of other threads.
//
// For copies from `device`, a GPU, its pages are locked, if the system allows it. That takes time,
// so such memory should be used again.
at::Tensor fresh_memory(int64_t bytes, c10::Device device = at::kCPU);

// Memory for one file after the other: writing to memory that was used before needs no page faults.
class KeptMemory {
 public:
  // As fresh_memory(), or what the last call returned, if that is as large and no longer in use.
  at::Tensor allocate(int64_t bytes, c10::Device device = at::kCPU);

 private:
  at::Tensor memory_;
  c10::Device device_ = at::kCPU;
};

}  // namespace zero
