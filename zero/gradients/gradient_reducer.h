// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Turns working gradients into gradient shards: fills buckets as backward produces gradients, and
// sends each as soon as it and all before it are complete. See Note [rounds] and Note [late
// gradients] in docs/design.md.
//
// Buckets are sent in the plan's order, round by round, except that buckets with a parameter that
// no rank used in the last step are last (expect_unused()). The round in which a gradient is sent
// depends only on this rank's calls, never on timing, so that results are the same bits run after
// run; a sum has the same terms whichever round they are in, so ranks need not choose the same one.
//
//   begin_pass (take_gradient | gradient_ready)* end_pass   optimizer.backward(loss): end_pass()
//                                                           closes the round, unless gradients are
//                                                           kept
//              (take_gradient | gradient_ready)*            loss.backward(): the round stays open
//   complete(n)   agreed by all ranks: a rank that is behind sends zeros up to round n
//   consume()     forgets all of this; the next step begins
//
// drop_resets() does what zero_grad() of the module asked for: the sums of earlier rounds are
// overwritten. Ranks must compare rounds_dropped(), as they agree on the rounds.
//
// A parameter has one place per round. Its second gradient in one pass (a shared weight under
// activation checkpointing fires several times) stays in p.grad() and is sent in the next round;
// its second gradient by plain backward() calls closes the round, so that micro-batches add up in
// the shards, in fp32.
//
// With ZeroOptions::micro_batches a step has one round, of the pass of this rank's last
// micro-batch; gradients of passes before it are kept in MicroBatchSums. With
// ZeroOptions::update_in_backward it has one round, too, and EarlyShards says how long shards live.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/comm/domain_communicators.h"
#include "zero/gradients/early_shards.h"
#include "zero/gradients/local_gradients.h"
#include "zero/gradients/micro_batch_sums.h"
#include "zero/gradients/open_round.h"
#include "zero/gradients/reduction_queue.h"
#include "zero/gradients/wire_format.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/parameter_table.h"

namespace zero {

struct ReducerOptions {
  WireFormats wires;  // per arena
  bool no_sync_fp32 = false;
  int64_t micro_batches = 0;                 // ZeroOptions::micro_batches; then there is one domain
  c10::ScalarType shard_dtype = at::kFloat;  // ZeroOptions::gradient_shard_dtype
  bool update_in_backward = false;           // ZeroOptions::update_in_backward
};

class GradientReducer {
 public:
  // References must outlive the reducer.
  GradientReducer(const Plan& plan, const ParameterTable& table,
                  std::vector<DomainCommunicators> comms, BufferPool& pool,
                  const ReducerOptions& options);

  // Collective. Sends a round of zeros where the host does not wait for transfers, as with NCCL.
  // Its first call of a kind and size connects, and holds the host until all ranks call it: in a
  // hook that would be for ever where a rank has no backward pass. To be called before the first
  // one.
  void connect();

  // With ReducerOptions::update_in_backward, behind connect(), which updates nothing.
  void update_with(BucketUpdates& updates) { early_->update_with(updates); }
  // Returns whether BucketUpdates::update() was called for the bucket since consume().
  bool is_updated(int64_t bucket) const { return early_ && early_->is_updated(bucket); }
  // Returns whether a round was begun since consume(), perhaps of zeros.
  bool has_packed() const { return rounds_ > 0 || round_.has_any(); }

  // Factor on every gradient besides the mean over ranks: 1 / loss scale.
  void set_scale(double scale) { scale_ = scale; }

  // Begins a backward pass, which end_pass() ends.
  void begin_pass();
  // Ends a pass. Unless gradients were `kept`, sends the rest of its round, with zeros for what is
  // missing: throws c10::Error for what was put into p.grad() and cannot be sent.
  void end_pass(bool kept);
  // The micro-batches of this rank; null without that option.
  const MicroBatchSums* micro_batches() const {
    return micro_batches_ ? &*micro_batches_ : nullptr;
  }
  // Returns whether the pass under way, or the next one, is of a micro-batch before the last.
  bool keeps_gradients() const { return micro_batches_ && !micro_batches_->is_last(); }
  // Makes p.grad() ready for the next gradient, by clear_placeholder() and, where it was reset, by
  // drop_resets(). Throws as they do.
  void before_gradient(int64_t parameter);
  // Returns whether p.grad() holds the marker of a gradient that is in a bucket.
  bool is_marked(int64_t parameter) const { return local_.is_marked(parameter); }
  // Tries to write parameter.grad() + gradient straight into the bucket, which saves a pass over
  // memory. Returns true if it did; autograd must then not accumulate. The bits are those of
  // gradient_ready(). Otherwise it changes nothing.
  bool take_gradient(int64_t parameter, const at::Tensor& gradient);
  // parameter.grad() was accumulated. Packs it, frees it at once, so that the next one is made in
  // the same warm memory, and sends what became complete; or leaves it there when it is the second
  // in a pass. Throws c10::Error for a gradient that cannot be sent, a sparse one for example.
  void gradient_ready(int64_t parameter);
  // The same under no_sync, and where keeps_gradients(): the gradient stays local.
  void gradient_kept(int64_t parameter);

  // Rounds this rank needs so that nothing it has is left behind.
  int64_t rounds_needed() const;
  // Closes rounds until `rounds` were sent, and waits for all of them. Throws when the
  // communication failed. From the first bucket until this returns, the data communicators refuse
  // every other operation.
  void complete(int64_t rounds);
  // Makes the current stream wait for the reductions, and updates, that are enqueued.
  void join() { queue_.join(); }
  // Throws when a reduction has failed already. Local.
  void check() { queue_.check(); }
  void leave_capture() { queue_.leave_capture(); }
  // Forgets gradients, rounds and used flags. Requires complete().
  void consume();
  // Sends buckets with a parameter that is not `used` last from now on, so that they do not hold
  // the others back. `used` must be the same on all ranks. To be called after consume().
  void expect_unused(const std::vector<uint8_t>& used) { round_.expect_unused(used); }

  // Sets used(): a parameter is used while it has a gradient, in p.grad() or sent. A gradient that
  // was put into p.grad() by hand counts; a dropped one does not.
  void claim_gradients();
  // Throws c10::Error when p.grad() holds what cannot be sent, or was changed although its gradient
  // is sent or averaged.
  void verify() const;
  // Drops the gradients that were reset in p.grad(), as by zero_grad() of the module. Throws
  // c10::Error when they were reset for some only of the parameters whose gradients were sent.
  void drop_resets();
  // The number of rounds since consume() whose gradients were dropped.
  int64_t rounds_dropped() const { return dropped_; }
  // Forgets the gradients that this rank has not sent; complete() then sends zeros in their place.
  void discard();

  // 1 where this rank had a gradient since consume().
  const std::vector<uint8_t>& used() const { return used_; }
  bool any_used() const;
  // 1 where a round since consume() has taken from p.grad() what was put there by hand, and no pass
  // has added to; or empty.
  const std::vector<uint8_t>& by_hand() const { return by_hand_; }
  // The own row, of ReducerOptions::shard_dtype: the mean over ranks, valid after complete() if
  // rounds > 0. Undefined where it is not kept.
  const at::Tensor& shard(int64_t bucket) const { return shards_[bucket]; }

  // The next gradient of this parameter replaces p.grad(), which holds an average.
  void mark_averaged(int64_t parameter) { local_.mark_average(parameter); }

  int64_t rounds_sent() const { return total_rounds_; }
  // Bytes of local gradients that wait for a later round, and of memory that is held for those of
  // the next step; and of gradients that are packed and wait for the rest of their bucket or for
  // the buckets before it.
  int64_t local_bytes() const {
    return local_.bytes() + (micro_batches_ ? micro_batches_->bytes() : 0);
  }
  int64_t unsent_bytes() const { return round_.unsent_bytes(); }
  // Those that are not the pool's.
  int64_t shard_bytes() const;
  // Frees the shards: from then on only functions that count bytes and the destructor may be
  // called.
  void release_shards() {
    shards_.clear();
    local_.free_recycled();
    if (micro_batches_) micro_batches_->free_recycled();
  }

 private:
  void make_shards();
  void close_round();
  void set_reducing(bool reducing);
  // With micro-batches: throws c10::Error for a gradient that was put into p.grad() by hand.
  void check_by_hand(int64_t parameter) const;
  void pack(int64_t parameter, const at::Tensor& gradient, const at::Tensor& added = {});
  void send_complete();
  bool accumulates(const DomainCommunicators& comms) const;
  void send_next();
  void send_round();
  void reduce_over_replicas();

  const Plan& plan_;
  const ParameterTable& table_;
  const std::vector<DomainCommunicators> comms_;
  BufferPool& pool_;
  const ReducerOptions options_;
  double scale_ = 1.0;

  LocalGradients local_;
  std::optional<MicroBatchSums> micro_batches_;
  const c10::Device device_;
  std::vector<at::Tensor> shards_;  // per bucket
  std::vector<uint8_t> used_;       // per parameter, since consume()
  std::vector<uint8_t> by_hand_;    // the same, or empty

  OpenRound round_;
  bool in_pass_ = false;

  bool reducing_ = false;  // a bucket was pushed since complete()
  // The rounds that were closed since consume(). Of them the first dropped_ no longer count, and
  // the sum of the first replicated_ is the same on all replicas. So a bucket of the next round is
  // assigned to its shard where all rounds before it were dropped, else added: see accumulates().
  int64_t rounds_ = 0;
  int64_t dropped_ = 0;
  int64_t replicated_ = 0;
  int64_t total_rounds_ = 0;  // since connect()
  ReductionQueue queue_;
  std::optional<EarlyShards> early_;  // with update_in_backward
};

}  // namespace zero
