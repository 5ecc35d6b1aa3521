// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reduces packed buckets in the order they are pushed, beside the backward pass, over a transport
// for which the host waits.
//
// One worker thread waits for the peers and sums, since Gloo can not be asked whether an exchange
// is complete. push() starts the exchange at once while fewer than kExchangesInFlight, or fewer
// than kBytesInFlight, are under way, so that sending never waits for summing, also with small
// buckets. Memory of a GPU is copied to the host and back by the worker, on a stream of its own, so
// that neither the thread nor the stream of the backward pass waits for a peer.
//
// Without a thread, where the system has none left, drain() does the worker's part.
//
// Thread safety: push() and drain() are for one thread; the worker is private.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "zero/gradients/reduction.h"

namespace zero {

class ReductionQueue {
  static constexpr int kExchangesInFlight = 2;
  static constexpr int64_t kBytesInFlight = int64_t{8} << 20;
  static constexpr std::chrono::milliseconds kPatience{20};

 public:
  // So many buckets may wait behind those under way before push() blocks.
  static constexpr int kWaiting = 2;

  // Returns whether one more exchange may be under way, or `waiting` more than that.
  static bool has_room(size_t exchanges, int64_t bytes, int waiting = 0) {
    return exchanges < static_cast<size_t>(kExchangesInFlight + waiting) || bytes < kBytesInFlight;
  }
  // Returns the number of buffers of `bucket_bytes` that a pool should keep between steps for a
  // queue and the thread that fills it: the exchanges under way, in both directions, what waits,
  // and two that are being filled. What is dropped costs a page fault for every 4 KiB in the next
  // step.
  static size_t buffers_kept(int64_t bucket_bytes);

  explicit ReductionQueue(BufferPool& pool) : pool_(pool) {}
  // Drops what is not finished; blocks until the operation under way ends or fails.
  ~ReductionQueue();

  // Blocks while more than kWaiting buckets are queued, which bounds memory when the network is
  // slower than the backward pass. It blocks for kPatience at most, over any number of calls, until
  // another bucket is done: a peer may be waiting for this thread. Errors surface in check() and
  // drain().
  void push(BucketReduction reduction);
  // Returns when everything pushed has reached its shard. Throws the first
  // error, again at every later call. A worker that stands still is one.
  void drain();
  // Throws the first error, if there is one by now.
  void check();

 private:
  struct Waiting {
    BucketReduction reduction;
    std::optional<c10::Event> packed;  // on a GPU
  };

  using Lock = std::unique_lock<std::mutex>;
  // With the lock held.
  bool has_room() const { return has_room(under_way_.size(), bytes_under_way_); }
  // With the lock held, which they give up meanwhile.
  void start_waiting(Lock& lock);
  void finish_front(Lock& lock);
  void take_turn(Lock& lock);
  void wait_for_worker(Lock& lock);

  void work();
  // Does nothing when no thread can be started: the next push() tries again.
  void start_worker();
  // Blocks push() as long as it may.
  void bound_memory(Lock& lock);

  BufferPool& pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  std::deque<Exchange> under_way_;  // exchanges started, the front one being finished
  std::exception_ptr error_;
  Communicator* group_ = nullptr;  // of the last push()
  int64_t bytes_under_way_ = 0;
  int64_t done_ = 0;                               // buckets
  int64_t done_at_push_ = 0;                       // at the last push()
  std::chrono::nanoseconds patience_ = kPatience;  // left until another bucket is done
  bool starting_ = false;                          // a thread is in start_waiting()
  bool stop_ = false;
  std::optional<c10::Stream> stream_;  // the worker's, on a GPU
  std::thread worker_;                 // started with the first exchange
};

}  // namespace zero
