// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The gradient shards of ZeroOptions::update_in_backward. A step has one round, and a shard lives
// from when its bucket is sent until it was given to BucketUpdates, on the thread that sends. Where
// this rank has no gradient of a parameter of its row, only step() knows whether another rank has
// one: such a shard is kept until end_step(). On a GPU a shard is taken, filled, read and given
// back on the stream of its sum, so that the next bucket's is the same memory, however far ahead
// the host is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/comm/domain_communicators.h"
#include "zero/gradients/open_round.h"
#include "zero/gradients/reduction_queue.h"
#include "zero/memory/buffer_pool.h"

namespace zero {

// What a reducer with ReducerOptions::update_in_backward calls.
class BucketUpdates {
 public:
  virtual ~BucketUpdates() = default;
  // For each bucket. If this rank `has_all_gradients` of its row, update() comes for it. The
  // current stream is that of the backward pass.
  virtual void before_sending(int64_t bucket, bool has_all_gradients) = 0;
  // GradientReducer::shard(bucket) is complete, or is on the current stream, which has waited for
  // what the backward pass had to do at before_sending().
  virtual void update(int64_t bucket) = 0;
};

class EarlyShards {
 public:
  // `shards`, one for each bucket, are undefined while they do not live. References must outlive
  // this.
  EarlyShards(const Plan& plan, const std::vector<DomainCommunicators>& comms,
              ReductionQueue& queue, BufferPool& pool, c10::Device device, c10::ScalarType dtype,
              std::vector<at::Tensor>& shards);

  // Before it is called shards are given back without an update.
  void update_with(BucketUpdates& updates) { updates_ = &updates; }
  // Returns whether BucketUpdates::update() was called for the bucket since end_step().
  bool is_updated(int64_t bucket) const { return updated_[bucket] != 0; }

  // Makes the shard of a bucket that is sent next. All gradients of it that `round` gets are there.
  void before_sending(int64_t bucket, const OpenRound& round);
  // The bucket was pushed or, without peers, reduced.
  void after_sending(int64_t bucket);
  void queue_drained();
  void end_step();

 private:
  struct SentBucket {
    int64_t bucket = 0;
    bool has_all_gradients = false;                  // of this rank, for its row
    std::optional<c10::Stream> sums = std::nullopt;  // of its shard; none: the current one
  };

  Communicator& ranks_of(int64_t bucket) const { return *comms_[plan_.domain_of(bucket)].data; }
  void update_reduced();
  void finish(const SentBucket& reduced);

  const Plan& plan_;
  const std::vector<DomainCommunicators>& comms_;
  ReductionQueue& queue_;
  BufferPool& pool_;
  const c10::Device device_;
  const c10::ScalarType dtype_;
  std::vector<at::Tensor>& shards_;
  BucketUpdates* updates_ = nullptr;
  std::vector<std::vector<int64_t>> own_parameters_;  // per bucket: those of this rank's row
  SentBucket sent_;                                   // the last one
  std::deque<SentBucket> under_way_;                  // in the order of the queue's worker
  int64_t finished_ = 0;                              // of those, since construction
  std::vector<uint8_t> updated_;                      // per bucket, since end_step()
};

}  // namespace zero
