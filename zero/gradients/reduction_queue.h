// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reduces packed buckets in the order they are pushed, beside the backward
// pass: exchange rows, sum them in rank order, add the result to the shard.
//
// On the host one worker thread waits for the peers and sums, since Gloo can
// not be asked whether an exchange is complete. push() starts the exchange at
// once while fewer than kExchangesInFlight, or fewer than kBytesInFlight, are
// under way, so that sending never waits for summing, also with small buckets. On a GPU nothing
// waits: exchanges run on the transport's stream, and the calling thread enqueues each sum behind
// its exchange.
//
// Thread safety: push() and drain() are for one thread; the worker is private.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "zero/communicator.h"
#include "zero/gradients/wire_format.h"
#include "zero/memory/buffer_pool.h"

namespace zero {

// One bucket on its way.
struct Reduction {
  const WireFormat* wire = nullptr;  // outlives the queue
  at::Tensor rows;   // [world_size, n] as encoded by `wire`, from the pool; given back when done
  at::Tensor shard;  // [row_numel] fp32
  bool accumulate = false;        // add to the shard, or assign it
  float scale = 1.0F;             // factor after the sum
  Communicator* group = nullptr;  // null or of one rank: nothing is sent
  int64_t bucket = 0;             // for errors and traces
};

class ReductionQueue {
  static constexpr int kExchangesInFlight = 2;
  static constexpr int64_t kBytesInFlight = int64_t{8} << 20;
  static constexpr int kWaiting = 2;
  static constexpr std::chrono::milliseconds kPatience{20};

 public:
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
  void push(Reduction reduction);
  // Returns when everything pushed has reached its shard. Throws the first
  // error, again at every later call.
  void drain();
  // Throws the first error, if there is one by now.
  void check();

 private:
  struct Exchange {
    Reduction reduction;
    at::Tensor buffer;
    Pending pending;
  };

  using Lock = std::unique_lock<std::mutex>;
  // With the lock held. Returns whether one more exchange may be under way.
  bool has_room() const;
  // With the lock held, which they give up meanwhile.
  void start_waiting(Lock& lock);
  void finish_front(Lock& lock);

  Exchange start(Reduction reduction);
  void finish(Exchange& exchange);
  void work();

  BufferPool& pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Reduction> waiting_;
  std::deque<Exchange> under_way_;  // exchanges started, the front one being finished
  std::exception_ptr error_;
  int64_t bytes_under_way_ = 0;
  int64_t done_ = 0;                               // buckets
  int64_t done_at_push_ = 0;                       // at the last push()
  std::chrono::nanoseconds patience_ = kPatience;  // left until another bucket is done
  bool starting_ = false;                          // a thread is in start_waiting()
  bool stop_ = false;
  std::thread worker_;  // started with the first exchange
};

}  // namespace zero
