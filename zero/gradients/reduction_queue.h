// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reduces packed buckets in the order they are pushed, beside the backward pass.
//
// Over a transport that works on streams, push() enqueues all that there is to do: see
// stream_reductions.h.
//
// Over one for which the host waits, one worker thread waits for the peers and sums, since Gloo can
// not be asked whether an exchange is complete. push() starts the exchange at once while fewer than
// kExchangesInFlight, or fewer than kBytesInFlight, are under way, so that sending never waits for
// summing, also with small buckets. Memory of a GPU is copied to the host and back by the worker,
// on a stream of its own, so that neither the thread nor the stream of the backward pass waits for
// a peer.
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
#include "zero/gradients/stream_reductions.h"

namespace zero {

class ReductionQueue {
 public:
  // Returns the number of buffers of `bucket_bytes` that a pool should keep between steps for a
  // queue and the thread that fills it: the exchanges under way, in both directions, what waits,
  // and two that are being filled. What is dropped costs a page fault for every 4 KiB in the next
  // step.
  static size_t buffers_kept(int64_t bucket_bytes);

  explicit ReductionQueue(BufferPool& pool) : pool_(pool), streams_(pool) {}
  // Drops what is not finished; blocks until the operation under way ends or fails.
  ~ReductionQueue();

  // Blocks while more than kWaiting buckets wait behind those under way, which bounds memory when
  // the network is slower than the backward pass. It blocks for kPatience at most, over any number
  // of calls, until another bucket is begun or done: a peer may be waiting for this thread. Errors
  // surface in check() and drain().
  void push(BucketReduction reduction);
  // Returns when everything pushed has reached its shard, or makes the current stream wait for it.
  // Throws the first error, again at every later call. A worker that stands still is one.
  void drain();
  // Makes the current stream wait for what the streams of this have to do by now.
  void join();
  // Throws the first error, if there is one by now.
  void check();
  void leave_capture() { streams_.leave_capture(); }
  // The stream of a GPU on which buckets of `group` reach their shards, in the order of push();
  // nothing on a CPU.
  std::optional<c10::Stream> sums(Communicator& group, c10::Device device);
  // As check(), and returns how many of the buckets for which the host waits, of those that were
  // pushed since construction, have reached their shards, or will on sums(): the first ones.
  int64_t done();

 private:
  static constexpr int kExchangesInFlight = 2;
  static constexpr int64_t kBytesInFlight = int64_t{8} << 20;
  static constexpr int kWaiting = 2;
  static constexpr std::chrono::milliseconds kPatience{20};

  struct Waiting {
    BucketReduction reduction;
    std::optional<c10::Event> packed;  // on a GPU
  };

  using Lock = std::unique_lock<std::mutex>;
  // Returns whether one more exchange may be under way, or `waiting` more than that.
  static bool has_room(size_t exchanges, int64_t bytes, int waiting = 0) {
    return exchanges < static_cast<size_t>(kExchangesInFlight + waiting) || bytes < kBytesInFlight;
  }

  // The thread of the worker.
  void work();
  // Does nothing when no thread can be started: the next push() tries again.
  void start_worker();

  // These are called with the lock held, and give it up meanwhile.
  void hand_to_worker(BucketReduction reduction, Lock& lock);
  void start_exchanges(Lock& lock);
  void finish_oldest(Lock& lock);
  // What the worker does each time it wakes up, and drain() without a worker.
  void work_once(Lock& lock);
  void wait_for_worker(Lock& lock);
  // Blocks push() as long as it may: until the worker, or the device, is done with enough.
  void bound_memory(Lock& lock);
  // Ends the group for the exception that is being handled, and keeps that. Takes the lock if it is
  // not held.
  void fail(Communicator& group, Lock& lock);

  BufferPool& pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  std::deque<Exchange> under_way_;  // exchanges started, the front one being finished
  std::exception_ptr error_;
  Communicator* group_ = nullptr;  // of the last one given to the worker
  int64_t bytes_under_way_ = 0;
  int64_t done_ = 0;          // buckets of the worker
  int64_t done_at_push_ = 0;  // of all buckets, at the last push() that blocked
  bool patient_ = true;       // push() has not used up kPatience since done_at_push_ changed
  bool starting_ = false;     // a thread is in start_exchanges()
  bool stop_ = false;
  StreamReductions streams_;
  std::optional<c10::Stream> stream_;  // the worker's, on a GPU
  std::thread worker_;                 // started with the first exchange
};

}  // namespace zero
