// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Copies of a shard from a device to host memory, on a stream beside the one that trains:
//
//   current stream   last step -- next forward and backward pass -- change bucket 1 -- change 0
//                             \                                   /                  /
//   copy stream                copy bucket 1 -------------------- copy bucket 0 ----
//
// The host waits for none of this except in captures; the thread that reads the copies does.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace zero {

class OwnThreadWait;

// In place of a bucket: that of tensors which may change before any bucket does.
inline constexpr int64_t kOfNoBucket = std::numeric_limits<int64_t>::max();

struct ShardCopy {
  at::Tensor from;     // any device and strides
  at::Tensor to;       // the bytes of its elements in order: kByte, contiguous, in host memory
  int64_t bucket = 0;  // a step changes the last one first
};

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

}  // namespace zero
