// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/open_round.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "zero/base/streams.h"
#include "zero/memory/bucket_memory.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/trace_range.h"

namespace zero {

OpenRound::OpenRound(const Plan& plan, const WireFormats& wires, BufferPool& pool,
                     size_t parameters, c10::Device device)
    : plan_(plan),
      wires_(wires),
      pool_(pool),
      device_(device),
      slots_(parameters),
      packed_(parameters, 0),
      open_(plan.buckets.size()) {
  for (int64_t b = 0; b < std::ssize(plan.buckets); ++b) {
    const auto& slots = plan.buckets[b].slots;
    for (size_t i = 0; i < slots.size(); ++i) slots_[slots[i].parameter].push_back({b, i});
  }
  expect_unused(std::vector<uint8_t>(parameters, 1));
  restart();
}

void OpenRound::restart() {
  packed_.assign(packed_.size(), 0);
  for (size_t b = 0; b < open_.size(); ++b) {
    open_[b].missing = static_cast<int64_t>(plan_.buckets[b].slots.size());
  }
  next_ = 0;
}

void OpenRound::expect_unused(const std::vector<uint8_t>& used) {
  TORCH_INTERNAL_ASSERT(!any_taken() && !has_any(), "the order of a round under way is fixed");
  if (used == expected_) return;
  expected_ = used;
  order_.clear();
  for (const bool complete : {true, false}) {
    for (int64_t b = 0; b < std::ssize(plan_.buckets); ++b) {
      const bool all = std::ranges::all_of(
          plan_.buckets[b].slots, [&](const Slot& slot) { return used[slot.parameter] != 0; });
      if (all == complete) order_.push_back(b);
    }
  }
}

bool OpenRound::has_any() const {
  return std::ranges::any_of(packed_, [](uint8_t p) { return p != 0; });
}

std::optional<c10::ScalarType> OpenRound::packed_dtype(int64_t parameter) const {
  if (slots_[parameter].empty()) return std::nullopt;
  return wire_of(plan_.buckets[slots_[parameter].front().bucket]).packed_dtype();
}

const at::Tensor& OpenRound::open(int64_t b) {
  const Bucket& bucket = plan_.buckets[b];
  Rows& packed = open_[b].packed;
  if (!packed.defined()) packed = wire_of(bucket).open(bucket.rows, pool_);
  return packed.values();
}

at::Tensor OpenRound::matrix(int64_t b, int64_t i) const {
  const at::Tensor& packed = open_[b].packed.values();
  const Bucket& bucket = plan_.buckets[b];
  if (wire_of(bucket).matrices() == 1) return packed;
  return packed.view({-1}).narrow(0, i * bucket.rows.total(), bucket.rows.total());
}

void OpenRound::wait_for_packing(int64_t b) {
  if (device_.is_cpu()) return;
  const c10::Stream current = current_torch_stream(device_);
  std::optional<c10::Stream>& last = open_[b].stream;
  if (last && *last != current) make_wait(current, *last);
  last = current;
}

void OpenRound::encode(int64_t b) {
  OpenBucket& open = open_[b];
  const WireFormat& wire = wire_of(plan_.buckets[b]);
  open.encoded = wire.encode(std::exchange(open.packed, Rows()), pool_);
  if (wire.packs_in_place()) return;
  const auto bytes = static_cast<int64_t>(open.encoded.values().nbytes());
  unsent_bytes_ += bytes - std::exchange(open.unsent_bytes, bytes);
}

void OpenRound::pack(int64_t parameter, c10::ArrayRef<MicroBatchSums::NodeSum> sums) {
  packed_[parameter] = 1;
  for (const BucketSlot& place : slots_[parameter]) {
    const TraceRange range("pack", place.bucket);
    const Bucket& bucket = plan_.buckets[place.bucket];
    const Slot& slot = bucket.slots[place.slot];
    const at::Tensor& packed = open(place.bucket);
    wait_for_packing(place.bucket);
    for (size_t i = 0; i < sums.size(); ++i) {
      copy_into_bucket(plan_, bucket, slot, sums[i].tensor,
                       matrix(place.bucket, static_cast<int64_t>(i)), sums[i].added);
    }
    OpenBucket& open = open_[place.bucket];
    const int64_t bytes =
        wire_of(bucket).matrices() * slot.numel * static_cast<int64_t>(packed.element_size());
    open.unsent_bytes += bytes;
    unsent_bytes_ += bytes;
    if (--open.missing == 0) encode(place.bucket);
  }
}

void OpenRound::fill_next() {
  const int64_t b = next();
  wait_for_packing(b);
  if (open_[b].encoded.defined()) return;
  const Bucket& bucket = plan_.buckets[b];
  open(b);
  for (const Slot& slot : bucket.slots) {
    if (has(slot.parameter)) continue;
    for (int64_t i = 0; i < wire_of(bucket).matrices(); ++i) {
      copy_into_bucket(plan_, bucket, slot, at::Tensor(), matrix(b, i));
    }
  }
  encode(b);
}

Rows OpenRound::take_next() {
  OpenBucket& open = open_[next()];
  unsent_bytes_ -= std::exchange(open.unsent_bytes, 0);
  open.stream.reset();
  ++next_;
  return std::exchange(open.encoded, Rows());
}

}  // namespace zero
