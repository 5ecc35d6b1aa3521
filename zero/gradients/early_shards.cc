// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/early_shards.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "zero/comm/row_communicator.h"

namespace zero {

EarlyShards::EarlyShards(const Plan& plan, const std::vector<DomainCommunicators>& comms,
                         ReductionQueue& queue, BufferPool& pool, c10::Device device,
                         c10::ScalarType dtype, std::vector<at::Tensor>& shards)
    : plan_(plan),
      comms_(comms),
      queue_(queue),
      pool_(pool),
      device_(device),
      dtype_(dtype),
      shards_(shards),
      own_parameters_(plan.buckets.size()),
      updated_(plan.buckets.size(), 0) {
  for (int64_t b = 0; b < std::ssize(plan.buckets); ++b) {
    for (const Segment& s : plan.segments(b, ranks_of(b).rank())) {
      own_parameters_[b].push_back(s.parameter);
    }
  }
}

void EarlyShards::before_sending(int64_t b, const OpenRound& round) {
  const std::vector<int64_t>& own = own_parameters_[b];
  // Then all ranks together have a gradient of each, whatever the others used.
  const bool has_all_gradients =
      !own.empty() && std::ranges::all_of(own, [&](int64_t p) { return round.has(p); });
  Communicator& ranks = ranks_of(b);
  sent_ = {b, has_all_gradients, std::nullopt};
  if (ranks.world_size() > 1) sent_.sums = queue_.sums(ranks, device_);
  if (updates_ != nullptr) updates_->before_sending(b, has_all_gradients);
  const c10::OptionalStreamGuard guard(sent_.sums);
  shards_[b] = pool_.acquire(plan_.buckets[b].rows.numel(ranks.rank()), dtype_);
}

void EarlyShards::after_sending(int64_t b) {
  Communicator& ranks = ranks_of(b);
  if (ranks.world_size() > 1 && RowCommunicator(ranks).waits_on_host(device_)) {
    under_way_.push_back(sent_);
  } else {
    queue_.check();  // after an error nothing is on the stream
    finish(sent_);
  }
  update_reduced();
}

void EarlyShards::queue_drained() {
  update_reduced();
  queue_.join();  // what was updated just now, too
}

void EarlyShards::update_reduced() {
  if (under_way_.empty()) return;
  for (const int64_t done = queue_.done(); !under_way_.empty() && finished_ < done; ++finished_) {
    const SentBucket reduced = under_way_.front();
    under_way_.pop_front();
    finish(reduced);
  }
}

void EarlyShards::finish(const SentBucket& reduced) {
  const c10::OptionalStreamGuard guard(reduced.sums);
  if (updates_ != nullptr) {
    if (!reduced.has_all_gradients) return;
    updates_->update(reduced.bucket);
    updated_[reduced.bucket] = 1;
  }
  pool_.release(std::exchange(shards_[reduced.bucket], at::Tensor()));
}

void EarlyShards::end_step() {
  updated_.assign(updated_.size(), 0);
  for (at::Tensor& shard : shards_) {
    if (shard.defined()) pool_.release(std::exchange(shard, at::Tensor()));
  }
}

}  // namespace zero
