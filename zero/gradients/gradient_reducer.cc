// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/gradient_reducer.h"

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "zero/base/streams.h"
#include "zero/comm/row_communicator.h"
#include "zero/gradients/replica_sum.h"
#include "zero/memory/bucket_memory.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/trace_range.h"

namespace zero {
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
      queue_(pool) {
  if (options.micro_batches > 0) {
    const Communicator& ranks = *comms_.front().data;
    sums_.emplace(table, options.micro_batches, ranks.rank(), ranks.world_size());
  }
  make_shards();
  places_.resize(used_.size());
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const auto& slots = plan.buckets[b].slots;
    for (size_t i = 0; i < slots.size(); ++i) {
      places_[slots[i].parameter].push_back({static_cast<int64_t>(b), i});
    }
  }
  expect_unused(std::vector<uint8_t>(used_.size(), 1));
  start_round();
}

void GradientReducer::make_shards() {
  updated_.assign(plan_.buckets.size(), 0);
  std::vector<int64_t> own;  // elements of this rank's row of each bucket
  for (size_t b = 0; b < plan_.buckets.size(); ++b) {
    const auto bucket = static_cast<int64_t>(b);
    const int64_t rank = comms_[plan_.domain_of(bucket)].data->rank();
    own.push_back(plan_.buckets[b].rows.numel(rank));
    if (!options_.update_in_backward) continue;
    own_parameters_.emplace_back();
    for (const Segment& s : plan_.segments(bucket, rank)) {
      own_parameters_.back().push_back(s.parameter);
    }
  }
  shards_.resize(own.size());
  if (options_.update_in_backward) return;
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

void GradientReducer::start_round() {
  packed_.assign(used_.size(), 0);
  open_.resize(plan_.buckets.size());
  for (size_t b = 0; b < open_.size(); ++b) {
    open_[b].missing = static_cast<int64_t>(plan_.buckets[b].slots.size());
  }
  next_ = 0;
}

void GradientReducer::expect_unused(const std::vector<uint8_t>& used) {
  TORCH_INTERNAL_ASSERT(next_ == 0 && !round_open(), "the order of a round under way is fixed");
  if (used == expected_) return;
  expected_ = used;
  order_.clear();
  for (const bool complete : {true, false}) {
    for (size_t b = 0; b < plan_.buckets.size(); ++b) {
      const auto& slots = plan_.buckets[b].slots;
      const bool all = std::all_of(slots.begin(), slots.end(),
                                   [&](const Slot& slot) { return used[slot.parameter] != 0; });
      if (all == complete) order_.push_back(static_cast<int64_t>(b));
    }
  }
}

bool GradientReducer::round_open() const {
  return std::any_of(packed_.begin(), packed_.end(), [](uint8_t p) { return p != 0; });
}

void GradientReducer::begin_pass() {
  // A round that plain backward() calls left open must not mix with this pass: gradients packed in
  // it would make those of this pass late.
  if (round_open()) close_round();
  in_pass_ = true;
}

void GradientReducer::end_pass(bool kept) {
  if (!kept) close_round();
  if (sums_) sums_->end_micro_batch();
}

void GradientReducer::gradient_kept(int64_t parameter) {
  used_[parameter] = 1;
  if (!sums_) {
    local_.keep(parameter);
    return;
  }
  sums_->add(parameter, local_.release(parameter));
  // As one that is sent: a module that resets it resets the sum.
  local_.mark_sent(parameter);
}

void GradientReducer::check_by_hand(int64_t parameter) const {
  TORCH_CHECK(
      !sums_ || !local_.has(parameter), "parameter ", table_.parameters()[parameter].name,
      ": expected gradients of backward() alone with ZeroOptions::micro_batches, got one in "
      "p.grad(), which belongs to no micro-batch; leave p.grad() empty");
}

void GradientReducer::before_gradient(int64_t parameter) {
  TORCH_CHECK(!options_.update_in_backward || (packed_[parameter] == 0 && rounds_ == 0),
              "parameter ", table_.parameters()[parameter].name,
              ": expected one gradient and one backward pass in a step with "
              "update_in_backward(true), got a second one, as of a pass without step() before it, "
              "or of a weight that several checkpointed parts share; make the optimizer without "
              "that option");
  // Before anything of this pass is sent, also where it begins with another parameter.
  if (local_.was_reset(parameter) || local_.sent_were_reset()) drop_resets();
  check_by_hand(parameter);
  local_.set_aside(parameter);
}

bool GradientReducer::take_gradient(int64_t parameter, const at::Tensor& gradient) {
  // A late one waits.
  if (packed_[parameter] != 0 || places_[parameter].empty()) return false;
  const Bucket& bucket = plan_.buckets[places_[parameter].front().bucket];
  const auto sum = local_.addend(parameter, gradient, wire_of(bucket).packed_dtype());
  if (!sum) return false;
  local_.release(parameter);
  pack(parameter, gradient, *sum);
  send_complete();
  return true;
}

void GradientReducer::gradient_ready(int64_t parameter) {
  local_.leave(parameter);
  // Never two gradients of a parameter in one round, even while its bucket is still
  // here: a 16-bit bucket would lose what a sum in fp32 keeps, and whether it is still
  // here depends on the size of buckets, on which results must not depend.
  if (packed_[parameter] != 0) {
    if (sums_) sums_->check_first(parameter);
    if (in_pass_) return;  // late: it is sent in the next round
    close_round();         // a new pass began with a plain backward()
  }
  pack(parameter, local_.release(parameter));
  send_complete();
}

const at::Tensor& GradientReducer::open(int64_t b) {
  const Bucket& bucket = plan_.buckets[b];
  Rows& packed = open_[b].packed;
  if (!packed.defined()) packed = wire_of(bucket).open(bucket.rows, pool_);
  return packed.values();
}

at::Tensor GradientReducer::matrix(int64_t b, int64_t i) const {
  const at::Tensor& packed = open_[b].packed.values();
  const Bucket& bucket = plan_.buckets[b];
  if (wire_of(bucket).matrices() == 1) return packed;
  return packed.view({-1}).narrow(0, i * bucket.rows.total(), bucket.rows.total());
}

void GradientReducer::follow_packing(int64_t b) {
  if (device_.is_cpu()) return;
  const c10::Stream current = current_torch_stream(device_);
  std::optional<c10::Stream>& last = open_[b].stream;
  if (last && *last != current) make_wait(current, *last);
  last = current;
}

// At once when a bucket is full: it may have to wait for the buckets before it, and encoded it may
// be smaller.
void GradientReducer::encode(int64_t b) {
  Open& open = open_[b];
  const WireFormat& wire = wire_of(plan_.buckets[b]);
  open.encoded = wire.encode(std::exchange(open.packed, Rows()), pool_);
  if (wire.packs_in_place()) return;
  const auto bytes = static_cast<int64_t>(open.encoded.values().nbytes());
  unsent_bytes_ += bytes - std::exchange(open.unsent_bytes, bytes);
}

// gradient + added, or only `gradient`.
void GradientReducer::pack(int64_t parameter, const at::Tensor& gradient, const at::Tensor& added) {
  packed_[parameter] = 1;
  used_[parameter] = 1;
  MicroBatchSums::Parts parts{{gradient, added}};
  if (sums_) parts = sums_->finish(parameter, gradient);
  for (const Place& place : places_[parameter]) {
    const TraceRange range("pack", place.bucket);
    const Bucket& bucket = plan_.buckets[place.bucket];
    const Slot& slot = bucket.slots[place.slot];
    const at::Tensor& packed = open(place.bucket);
    follow_packing(place.bucket);
    for (size_t i = 0; i < parts.size(); ++i) {
      copy_into_bucket(plan_, bucket, slot, parts[i].tensor, matrix(place.bucket, i),
                       parts[i].added);
    }
    Open& open = open_[place.bucket];
    const int64_t bytes =
        wire_of(bucket).matrices() * slot.numel * static_cast<int64_t>(packed.element_size());
    open.unsent_bytes += bytes;
    unsent_bytes_ += bytes;
    if (--open.missing == 0) encode(place.bucket);
  }
  local_.mark_sent(parameter);
}

void GradientReducer::send_complete() {
  while (next_ < static_cast<int64_t>(order_.size()) && open_[order_[next_]].missing == 0)
    send_next();
}

void GradientReducer::send_next() {
  const int64_t b = order_[next_];
  const Bucket& bucket = plan_.buckets[b];
  const Arena& arena = plan_.arena_of(bucket);
  const DomainCommunicators& comms = comms_[arena.domain];
  const int64_t ranks =
      comms.averaged_over > 0
          ? comms.averaged_over
          : arena.world_size * (comms.replicas == nullptr ? 1 : comms.replicas->world_size());
  follow_packing(b);
  // The bucket is not full: its round is being closed.
  if (!open_[b].encoded.defined()) {
    open(b);
    for (const Slot& slot : bucket.slots) {
      if (packed_[slot.parameter] != 0) continue;
      for (int64_t i = 0; i < wire_of(bucket).matrices(); ++i) {
        copy_into_bucket(plan_, bucket, slot, at::Tensor(), matrix(b, i));
      }
    }
    encode(b);
  }
  UnderWay sent{b, has_whole_row(b)};
  if (options_.update_in_backward) {
    if (comms.data->world_size() > 1) sent.sums = queue_.sums(*comms.data, device_);
    take_shard(sent);
  }
  BucketReduction reduction;
  reduction.wire = &wire_of(bucket);
  reduction.rows = std::exchange(open_[b].encoded, Rows());
  unsent_bytes_ -= std::exchange(open_[b].unsent_bytes, 0);
  reduction.shard = shards_[b];
  // After reduce_over_replicas() all replicas hold their common mean: only the first of them
  // carries it into a further sum.
  const bool carries = comms.replicas == nullptr || comms.replicas->rank() == 0;
  reduction.accumulate = rounds_ > (carries ? dropped_ : std::max(dropped_, replicated_));
  reduction.scale = static_cast<float>(scale_ / static_cast<double>(ranks));
  reduction.group = comms.data;
  reduction.bucket = b;
  set_reducing(true);
  open_[b].stream.reset();
  ++next_;  // not before: if memory has run out above, the next call sends the bucket
  if (has_peers(reduction)) {
    queue_.push(std::move(reduction));
  } else {
    reduce_alone(reduction, pool_);
  }
  if (!options_.update_in_backward) return;
  if (comms.data->world_size() > 1 && RowCommunicator(*comms.data).waits_on_host(device_)) {
    under_way_.push_back(sent);
  } else {
    queue_.check();  // after an error nothing is on the stream
    finish_shard(sent);
  }
  update_reduced();
}

void GradientReducer::take_shard(const UnderWay& sent) {
  if (updates_ != nullptr) updates_->before_sending(sent.bucket, sent.whole);
  const c10::OptionalStreamGuard guard(sent.sums);
  const int64_t rank = comms_[plan_.domain_of(sent.bucket)].data->rank();
  shards_[sent.bucket] =
      pool_.take(plan_.buckets[sent.bucket].rows.numel(rank), options_.shard_dtype);
}

// Then all ranks together have a gradient of each, whatever the others used.
bool GradientReducer::has_whole_row(int64_t b) const {
  if (!options_.update_in_backward || own_parameters_[b].empty()) return false;
  return std::all_of(own_parameters_[b].begin(), own_parameters_[b].end(),
                     [&](int64_t p) { return packed_[p] != 0; });
}

void GradientReducer::update_reduced() {
  if (under_way_.empty()) return;
  for (const int64_t done = queue_.done(); !under_way_.empty() && taken_ < done; ++taken_) {
    const UnderWay reduced = under_way_.front();
    under_way_.pop_front();
    finish_shard(reduced);
  }
}

void GradientReducer::finish_shard(const UnderWay& reduced) {
  const c10::OptionalStreamGuard guard(reduced.sums);
  if (updates_ != nullptr) {
    if (!reduced.whole) return;
    updates_->update(reduced.bucket);
    updated_[reduced.bucket] = 1;
  }
  pool_.give(std::exchange(shards_[reduced.bucket], at::Tensor()));
}

void GradientReducer::close_round() {
  in_pass_ = false;
  const auto count = static_cast<int64_t>(table_.parameters().size());
  for (int64_t p = 0; p < count; ++p) {
    if (packed_[p] != 0) continue;
    check_by_hand(p);
    if (local_.has(p)) {
      if (local_.is_by_hand(p)) {
        by_hand_.resize(used_.size());
        by_hand_[p] = 1;
      }
      pack(p, local_.release(p));
    }
    if (sums_ && sums_->has(p)) pack(p, at::Tensor());
  }
  send_round();
}

void GradientReducer::send_round() {
  while (next_ < static_cast<int64_t>(order_.size())) send_next();
  ++rounds_;
  ++total_rounds_;
  start_round();
}

int64_t GradientReducer::rounds_needed() const {
  bool open_round = round_open();
  bool late = false;
  for (size_t p = 0; p < used_.size(); ++p) {
    if (!local_.has(static_cast<int64_t>(p))) continue;
    (packed_[p] != 0 ? late : open_round) = true;
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
  update_reduced();
  if (options_.update_in_backward) queue_.join();  // what was updated just now, too
  pool_.joined();
  set_reducing(false);
  if (rounds > replicated_) {
    reduce_over_replicas();
    replicated_ = rounds;
  }
}

void GradientReducer::reduce_over_replicas() {
  std::vector<ReplicaShard> items;
  for (size_t b = 0; b < shards_.size(); ++b) {
    Communicator* replicas = comms_[plan_.domain_of(static_cast<int64_t>(b))].replicas;
    // Also with an empty row, since other ranks that share these or other replicas have a full one.
    if (replicas == nullptr || replicas->world_size() == 1) continue;
    items.push_back({shards_[b], replicas, "gradient shard " + std::to_string(b)});
  }
  sum_over_replicas(items, pool_);
}

void GradientReducer::consume() {
  TORCH_INTERNAL_ASSERT(next_ == 0, "consume() with a round under way");
  in_pass_ = false;  // also of a pass that ended with an exception
  std::fill(used_.begin(), used_.end(), 0);
  by_hand_.clear();
  local_.consume();
  if (sums_) sums_->forget();
  rounds_ = 0;
  dropped_ = 0;
  replicated_ = 0;
  if (options_.update_in_backward) {
    std::fill(updated_.begin(), updated_.end(), 0);
    for (at::Tensor& shard : shards_) {
      if (shard.defined()) pool_.give(std::exchange(shard, at::Tensor()));
    }
  }
  pool_.trim();
}

void GradientReducer::verify() const {
  local_.verify();
  for (size_t p = 0; p < used_.size() && sums_; ++p) check_by_hand(static_cast<int64_t>(p));
}

bool GradientReducer::any_used() const {
  return std::any_of(used_.begin(), used_.end(), [](uint8_t u) { return u != 0; });
}

void GradientReducer::claim_gradients() {
  for (size_t i = 0; i < used_.size(); ++i) {
    const auto p = static_cast<int64_t>(i);
    used_[i] = local_.is_sent(p) || local_.has(p) ? 1 : 0;
  }
}

void GradientReducer::drop_resets() {
  bool any = false;
  for (size_t p = 0; p < used_.size() && !any; ++p) any = local_.was_reset(static_cast<int64_t>(p));
  if (!any) return;
  TORCH_CHECK(!options_.update_in_backward,
              "zero_grad() of the module or of a base class after a backward pass: expected step() "
              "next with update_in_backward(true), which updates parameters before, got gradients "
              "that were reset; call it before backward(), and go on from a checkpoint");
  if (local_.forget_resets()) {
    // Other ranks have sent their part of the open round. It has no gradients but those.
    if (round_open()) send_round();
    dropped_ = rounds_;
    by_hand_.clear();
    if (sums_) sums_->forget();
  }
  claim_gradients();
}

void GradientReducer::discard() {
  local_.discard();
  if (sums_) sums_->forget();
  in_pass_ = false;
}

int64_t GradientReducer::shard_bytes() const {
  int64_t bytes = 0;
  if (options_.update_in_backward) return bytes;
  for (const at::Tensor& shard : shards_) bytes += static_cast<int64_t>(shard.nbytes());
  return bytes;
}

}  // namespace zero
