// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/gradient_reducer.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "zero/comm/row_communicator.h"
#include "zero/gradients/replica_sum.h"

namespace zero {
namespace {

// What divides the sums of gradients.
int64_t divisor_of(const DomainCommunicators& comms) {
  if (comms.averaged_over > 0) return comms.averaged_over;
  return comms.data->world_size() * (comms.replicas == nullptr ? 1 : comms.replicas->world_size());
}

}  // namespace

GradientReducer::GradientReducer(const Plan& plan, const ParameterTable& table,
                                 std::vector<DomainCommunicators> comms, BufferPool& pool,
                                 const ReducerOptions& options)
    : plan_(plan),
      table_(table),
      comms_(std::move(comms)),
      pool_(pool),
      options_(options),
      local_(table, options.no_sync_fp32),
      device_(table.parameters().front().tensor.device()),
      used_(table.parameters().size(), 0),
      round_(plan, options_.wires, pool, used_.size(), device_),
      queue_(pool) {
  if (options.micro_batches > 0) {
    const Communicator& ranks = *comms_.front().data;
    micro_batches_.emplace(table, options.micro_batches, ranks.rank(), ranks.world_size());
  }
  shards_.resize(plan.buckets.size());
  if (options.update_in_backward) {
    early_.emplace(plan, comms_, queue_, pool, device_, options.shard_dtype, shards_);
  } else {
    make_shards();
  }
}

void GradientReducer::make_shards() {
  std::vector<int64_t> own;  // elements of this rank's row of each bucket
  for (const Bucket& bucket : plan_.buckets) {
    own.push_back(bucket.rows.numel(comms_[plan_.arena_of(bucket).domain].data->rank()));
  }
  // One allocation: shards are read bucket by bucket, but a norm reads them all.
  const at::Tensor flat =
      at::zeros({std::accumulate(own.begin(), own.end(), int64_t{0})},
                at::TensorOptions().dtype(options_.shard_dtype).device(device_));
  int64_t begin = 0;
  for (size_t b = 0; b < own.size(); ++b) {
    shards_[b] = flat.narrow(0, begin, own[b]);
    begin += own[b];
  }
}

void GradientReducer::connect() {
  const bool on_streams = std::ranges::any_of(comms_, [&](const DomainCommunicators& comms) {
    return comms.data->world_size() > 1 && !RowCommunicator(*comms.data).waits_on_host(device_);
  });
  if (!on_streams) return;
  // Replicas exchange in collective calls, where all ranks come.
  replicated_ = 1;
  send_round();
  complete(1);
  consume();
  total_rounds_ = 0;
}

void GradientReducer::begin_pass() {
  // A round that plain backward() calls left open must not mix with this pass: gradients packed in
  // it would make those of this pass late.
  if (round_.has_any()) close_round();
  in_pass_ = true;
}

void GradientReducer::end_pass(bool kept) {
  if (!kept) close_round();
  if (micro_batches_) micro_batches_->end_micro_batch();
}

void GradientReducer::gradient_kept(int64_t parameter) {
  used_[parameter] = 1;
  if (!micro_batches_) {
    local_.accumulate_locally(parameter);
    return;
  }
  micro_batches_->add(parameter, local_.take_sum(parameter));
  // As one that is sent: a module that resets it resets the sum.
  local_.mark_sent(parameter);
}

void GradientReducer::check_by_hand(int64_t parameter) const {
  TORCH_CHECK(
      !micro_batches_ || !local_.has(parameter), "parameter ", table_.parameters()[parameter].name,
      ": expected gradients of backward() alone with ZeroOptions::micro_batches, got one in "
      "p.grad(), which belongs to no micro-batch; leave p.grad() empty");
}

void GradientReducer::before_gradient(int64_t parameter) {
  TORCH_CHECK(!options_.update_in_backward || (!round_.has(parameter) && rounds_ == 0),
              "parameter ", table_.parameters()[parameter].name,
              ": expected one gradient and one backward pass in a step with "
              "update_in_backward(true), got a second one, as of a pass without step() before it, "
              "or of a weight that several checkpointed parts share; make the optimizer without "
              "that option");
  // Before anything of this pass is sent, also where it begins with another parameter.
  if (local_.was_reset(parameter) || local_.sent_were_reset()) drop_resets();
  check_by_hand(parameter);
  local_.clear_placeholder(parameter);
}

bool GradientReducer::take_gradient(int64_t parameter, const at::Tensor& gradient) {
  if (round_.has(parameter)) return false;  // a late one waits
  const auto dtype = round_.packed_dtype(parameter);
  const auto sum = dtype ? local_.sum_to_add(parameter, gradient, *dtype) : std::nullopt;
  if (!sum) return false;
  local_.take_sum(parameter);
  pack(parameter, gradient, *sum);
  send_complete();
  return true;
}

void GradientReducer::gradient_ready(int64_t parameter) {
  local_.note_accumulated(parameter);
  // Never two gradients of a parameter in one round, even while its bucket is still
  // here: a 16-bit bucket would lose what a sum in fp32 keeps, and whether it is still
  // here depends on the size of buckets, on which results must not depend.
  if (round_.has(parameter)) {
    if (micro_batches_) micro_batches_->check_first(parameter);
    if (in_pass_) return;  // late: it is sent in the next round
    close_round();         // a new pass began with a plain backward()
  }
  pack(parameter, local_.take_sum(parameter));
  send_complete();
}

// gradient + added, or only `gradient`.
void GradientReducer::pack(int64_t parameter, const at::Tensor& gradient, const at::Tensor& added) {
  used_[parameter] = 1;
  MicroBatchSums::NodeSums sums{{gradient, added}};
  if (micro_batches_) sums = micro_batches_->finish(parameter, gradient);
  round_.pack(parameter, sums);
  local_.mark_sent(parameter);
}

void GradientReducer::send_complete() {
  while (round_.next_is_full()) send_next();
}

// True for a later round of a step. After reduce_over_replicas() all replicas hold their common
// mean: only the first of them carries it into a further sum.
bool GradientReducer::accumulates(const DomainCommunicators& comms) const {
  const bool carries = comms.replicas == nullptr || comms.replicas->rank() == 0;
  return rounds_ > (carries ? dropped_ : std::max(dropped_, replicated_));
}

void GradientReducer::send_next() {
  const int64_t b = round_.next();
  const Bucket& bucket = plan_.buckets[b];
  const DomainCommunicators& comms = comms_[plan_.arena_of(bucket).domain];
  round_.fill_next();  // with zeros, where the round is being closed
  if (early_) early_->before_sending(b, round_);
  BucketReduction reduction;
  reduction.wire = options_.wires[bucket.arena].get();
  reduction.rows = round_.take_next();  // only now: if memory has run out, the next call sends it
  reduction.shard = shards_[b];
  reduction.accumulate = accumulates(comms);
  reduction.scale = static_cast<float>(scale_ / static_cast<double>(divisor_of(comms)));
  reduction.group = comms.data;
  reduction.bucket = b;
  set_reducing(true);
  if (has_peers(reduction)) {
    queue_.push(std::move(reduction));
  } else {
    reduce_alone(reduction, pool_);
  }
  if (early_) early_->after_sending(b);
}

void GradientReducer::close_round() {
  in_pass_ = false;
  for (int64_t p = 0; p < std::ssize(used_); ++p) {
    if (round_.has(p)) continue;
    check_by_hand(p);
    if (local_.has(p)) {
      if (local_.is_by_hand(p)) {
        by_hand_.resize(used_.size());
        by_hand_[p] = 1;
      }
      pack(p, local_.take_sum(p));
    }
    if (micro_batches_ && micro_batches_->has(p)) pack(p, at::Tensor());
  }
  send_round();
}

void GradientReducer::send_round() {
  while (!round_.all_taken()) send_next();
  ++rounds_;
  ++total_rounds_;
  round_.restart();
}

int64_t GradientReducer::rounds_needed() const {
  bool open_round = round_.has_any();
  bool late = false;
  for (int64_t p = 0; p < std::ssize(used_); ++p) {
    if (local_.has(p)) (round_.has(p) ? late : open_round) = true;
  }
  return rounds_ + (open_round ? 1 : 0) + (late ? 1 : 0);
}

void GradientReducer::set_reducing(bool reducing) {
  if (std::exchange(reducing_, reducing) == reducing) return;
  for (const DomainCommunicators& comms : comms_) {
    reducing ? RowCommunicator(*comms.data).begin_reductions()
             : RowCommunicator(*comms.data).end_reductions();
  }
}

void GradientReducer::complete(int64_t rounds) {
  while (rounds_ < rounds) close_round();
  queue_.drain();
  if (early_) early_->queue_drained();
  pool_.joined();
  set_reducing(false);
  if (rounds > replicated_) {
    reduce_over_replicas();
    replicated_ = rounds;
  }
}

void GradientReducer::reduce_over_replicas() {
  std::vector<ReplicaShard> items;
  for (int64_t b = 0; b < std::ssize(shards_); ++b) {
    Communicator* replicas = comms_[plan_.domain_of(b)].replicas;
    // Also with an empty row, since other ranks that share these or other replicas have a full one.
    if (replicas == nullptr || replicas->world_size() == 1) continue;
    items.push_back({shards_[b], replicas, "gradient shard " + std::to_string(b)});
  }
  sum_over_replicas(items, pool_);
}

void GradientReducer::consume() {
  TORCH_INTERNAL_ASSERT(!round_.any_taken(), "consume() with a round under way");
  in_pass_ = false;  // also of a pass that ended with an exception
  std::fill(used_.begin(), used_.end(), 0);
  by_hand_.clear();
  local_.end_step();
  if (micro_batches_) micro_batches_->drop_all();
  rounds_ = 0;
  dropped_ = 0;
  replicated_ = 0;
  if (early_) early_->end_step();
  pool_.trim();
}

void GradientReducer::verify() const {
  local_.verify();
  for (int64_t p = 0; p < std::ssize(used_) && micro_batches_; ++p) check_by_hand(p);
}

bool GradientReducer::any_used() const {
  return std::ranges::any_of(used_, [](uint8_t u) { return u != 0; });
}

void GradientReducer::claim_gradients() {
  for (int64_t p = 0; p < std::ssize(used_); ++p) {
    used_[p] = local_.is_sent(p) || local_.has(p) ? 1 : 0;
  }
}

void GradientReducer::drop_resets() {
  bool any = false;
  for (int64_t p = 0; p < std::ssize(used_) && !any; ++p) any = local_.was_reset(p);
  if (!any) return;
  TORCH_CHECK(!options_.update_in_backward,
              "zero_grad() of the module or of a base class after a backward pass: expected step() "
              "next with update_in_backward(true), which updates parameters before, got gradients "
              "that were reset; call it before backward(), and go on from a checkpoint");
  if (local_.drop_resets()) {
    // Other ranks have sent their part of the open round. It has no gradients but those.
    if (round_.has_any()) send_round();
    dropped_ = rounds_;
    by_hand_.clear();
    if (micro_batches_) micro_batches_->drop_all();
  }
  claim_gradients();
}

void GradientReducer::discard() {
  local_.drop_all();
  if (micro_batches_) micro_batches_->drop_all();
  in_pass_ = false;
}

int64_t GradientReducer::shard_bytes() const {
  int64_t bytes = 0;
  if (early_) return bytes;
  for (const at::Tensor& shard : shards_) bytes += static_cast<int64_t>(shard.nbytes());
  return bytes;
}

}  // namespace zero
