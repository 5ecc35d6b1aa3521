// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The reductions of a ReductionQueue over a transport that works on streams of a GPU.
//
//   current stream    pack bucket k ---- pack k+1 ---- ... ---- join()
//                                 \              \             /
//   exchange stream                exchange k     k+1         /
//                                            \        \      /
//   sum stream                                sum k    sum k+1
//
// The current stream computes the model, so it must not wait for peers before join(): a peer may
// run fewer backward passes, and sends its share of a bucket only after the control message of the
// next collective call, which this rank may not reach before the device has caught up.
//
// Thread safety: none; calls may be made by different threads one after the other.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <optional>

#include "zero/gradients/reduction.h"

namespace zero {

class StreamReductions {
 public:
  explicit StreamReductions(BufferPool& pool) : pool_(pool) {}
  // Makes the current stream wait for what is under way.
  ~StreamReductions();
  StreamReductions(const StreamReductions&) = delete;
  StreamReductions& operator=(const StreamReductions&) = delete;

  // Enqueues the reduction behind what the current stream has to do.
  void enqueue(BucketReduction reduction);
  // Makes the current stream wait until all of them have reached their shards. The host does not
  // wait.
  void join();
  // Makes the current stream wait for those of this object that are in its capture in a CUDA graph.
  // CUDA ends no capture before they are joined.
  void leave_capture();

  // The stream where they reach their shards, in the order of enqueue().
  const c10::Stream& sums(c10::Device device);

  // Lets go of those that the device is done with, and returns how many they were since
  // construction. Not in a capture.
  int64_t retire_completed();
  // Of the others. None is counted in a capture.
  size_t count() const { return under_way_.size(); }
  int64_t bytes() const { return bytes_under_way_; }

 private:
  struct EnqueuedSum {
    c10::Event done;
    int64_t bytes = 0;
  };

  BufferPool& pool_;
  std::optional<c10::Stream> exchange_stream_;
  std::optional<c10::Stream> sum_stream_;
  std::deque<EnqueuedSum> under_way_;
  int64_t bytes_under_way_ = 0;
  int64_t done_ = 0;
};

}  // namespace zero
