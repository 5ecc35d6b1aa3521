// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reduces packed buckets of a GPU beside the backward pass, over a transport that works on streams.
//
//   current stream    pack bucket k ---- pack k+1 ---- ... ---- drain()
//                                 \              \             /
//   exchange stream                exchange k     k+1         /
//                                            \        \      /
//   sum stream                                sum k    sum k+1
//
// The current stream computes the model, so it must not wait for peers before drain(): a peer may
// run fewer backward passes, and sends its share of a bucket only after the control message of the
// next collective call, which this rank may not reach before the device has caught up.
//
// Thread safety: none; calls may be made by different threads one after the other.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <deque>
#include <exception>
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

  // Enqueues the reduction behind what the current stream has to do. While many buckets are under
  // way, the host first waits until the device is done with one, which bounds memory; for
  // kPatience in all until that happens, since a peer may be waiting for this thread. Errors
  // surface in check() and drain().
  void push(BucketReduction reduction);
  // Makes the current stream wait until everything pushed has reached its shard. The host does not
  // wait. Throws the first error, again at every later call.
  void drain();
  // Throws the first error, if there is one by now.
  void check() const;

 private:
  static constexpr std::chrono::milliseconds kPatience{20};

  struct UnderWay {
    c10::Event done;
    int64_t bytes = 0;
  };

  void enqueue(BucketReduction reduction);
  void bound_memory();
  // Makes the current stream wait for the streams of this.
  void join();

  BufferPool& pool_;
  std::optional<c10::Stream> exchange_stream_;
  std::optional<c10::Stream> sum_stream_;
  std::deque<UnderWay> under_way_;
  int64_t bytes_under_way_ = 0;
  std::chrono::nanoseconds patience_ = kPatience;  // left until another bucket is done
  std::exception_ptr error_;
};

}  // namespace zero
