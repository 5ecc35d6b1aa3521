// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "bookkeeping/layout.h"

namespace zero {
namespace {

void check_arguments(c10::ArrayRef<ParameterInfo> parameters, c10::ArrayRef<int64_t> world_sizes,
                     const PlanOptions& options) {
  TORCH_CHECK(options.bucket_bytes.value_or(0) >= 0, "bucket_bytes: expected 0 or more, got ",
              *options.bucket_bytes);
  TORCH_CHECK(options.ranks_per_machine >= 1, "ranks_per_machine: expected 1 or more, got ",
              options.ranks_per_machine);
  for (int64_t world_size : world_sizes) {
    TORCH_CHECK(world_size >= 1, "world size: expected 1 or more, got ", world_size);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& info = parameters[i];
    TORCH_CHECK(info.numel >= 0, "parameter ", i, ": expected 0 or more elements, got ",
                info.numel);
    TORCH_CHECK(info.cost.value_or(0) >= 0, "parameter ", i, ": expected a cost of 0 or more, got ",
                *info.cost);
    TORCH_CHECK(info.block >= 1 && (info.block & (info.block - 1)) == 0, "parameter ", i,
                ": expected blocks of a power of two, got ", info.block);
    TORCH_CHECK(info.domain >= 0 && info.domain < static_cast<int64_t>(world_sizes.size()),
                "parameter ", i, ": domain ", info.domain, " has no world size; expected below ",
                world_sizes.size());
    TORCH_CHECK(info.dtype == c10::ScalarType::Float || info.dtype == c10::ScalarType::BFloat16 ||
                    info.dtype == c10::ScalarType::Half,
                "parameter ", i, ": expected float, bfloat16 or half, got ", info.dtype);
  }
}

// Arenas in the order in which reverse registration first meets them.
void make_arenas(c10::ArrayRef<ParameterInfo> parameters, c10::ArrayRef<int64_t> world_sizes,
                 Layout default_layout, Plan& plan) {
  std::map<std::tuple<c10::ScalarType, int64_t, Layout>, int64_t> index;
  plan.parameter_arena.assign(parameters.size(), 0);
  for (int64_t i = static_cast<int64_t>(parameters.size()) - 1; i >= 0; --i) {
    const ParameterInfo& info = parameters[i];
    const Layout layout = info.layout.value_or(default_layout);
    auto [found, added] = index.try_emplace({info.dtype, info.domain, layout}, plan.arenas.size());
    if (added) {
      plan.arenas.push_back(
          {info.dtype, info.domain, world_sizes[info.domain], 0, 0, {}, &layout_of(layout)});
    }
    Arena& arena = plan.arenas[found->second];
    arena.parameters.push_back(i);
    arena.parameter_numel += info.numel;
    plan.parameter_arena[i] = found->second;
  }
}

// The position, in reverse registration order, of the last parameter that `bucket` waits for.
int64_t ready(const Bucket& bucket, c10::ArrayRef<ParameterInfo> parameters) {
  int64_t last = 0;
  for (const Slot& slot : bucket.slots) {
    last = std::max(last, static_cast<int64_t>(parameters.size()) - 1 - slot.parameter);
  }
  return last;
}

// FNV-1a over 64-bit words: enough to compare plans, and free of dependencies.
class Hash {
 public:
  void add(int64_t value) {
    state_ ^= static_cast<uint64_t>(value);
    state_ *= 0x100000001b3ULL;
    state_ ^= state_ >> 29;
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0xcbf29ce484222325ULL;
};

// Rows of one length add that; others add -1, which is no length, and every row that is not empty.
void add(const BucketRows& rows, Hash& hash) {
  hash.add(rows.equal() ? rows.equal_numel() : -1);
  if (rows.equal()) return;
  hash.add(static_cast<int64_t>(rows.filled().size()));
  for (const int64_t row : rows.filled()) {
    hash.add(row);
    hash.add(rows.end(row));
  }
}

}  // namespace

std::vector<Span> Plan::spans(const Bucket& bucket, const Slot& slot) const {
  return layout_of(bucket).spans(bucket, slot);
}

std::vector<Segment> Plan::segments(int64_t bucket_index, int64_t rank) const {
  const Bucket& bucket = buckets[bucket_index];
  const ParameterLayout& layout = layout_of(bucket);
  const int64_t row_begin = bucket.rows.begin(rank);
  std::vector<Segment> result;
  for (const Slot& slot : bucket.slots) {
    const Span span = layout.span_in_row(bucket, slot, rank);
    if (span.numel == 0) continue;
    result.push_back({slot.parameter, span.parameter_begin, span.numel, bucket_index,
                      span.bucket_begin - row_begin});
  }
  return result;
}

uint64_t Plan::fingerprint() const {
  Hash hash;
  const ParameterLayout* const first =
      arenas.empty() ? &zero::layout_of(Layout::kContiguous) : arenas.front().layout;
  hash.add(static_cast<int64_t>(first->id()));
  for (const Arena& arena : arenas) {
    if (arena.layout != first) hash.add(static_cast<int64_t>(arena.layout->id()));
    hash.add(static_cast<int64_t>(arena.dtype));
    for (int64_t value : {arena.domain, arena.world_size, arena.numel}) hash.add(value);
    for (int64_t p : arena.parameters) hash.add(p);
  }
  for (const Bucket& bucket : buckets) {
    for (int64_t value : {bucket.arena, bucket.begin}) hash.add(value);
    add(bucket.rows, hash);
    for (const Slot& slot : bucket.slots) {
      for (int64_t value : {slot.parameter, slot.begin, slot.numel, slot.offset, slot.columns}) {
        hash.add(value);
      }
    }
  }
  return hash.value();
}

int64_t default_bucket_bytes(int64_t world_size, bool on_gpu) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  return std::clamp(world_size * kMiB / 4, on_gpu ? 32 * kMiB : 4 * kMiB,
                    on_gpu ? 128 * kMiB : 64 * kMiB);
}

Plan make_plan(c10::ArrayRef<ParameterInfo> parameters, c10::ArrayRef<int64_t> world_sizes,
               const PlanOptions& options) {
  check_arguments(parameters, world_sizes, options);
  Plan plan;
  plan.parameter_offset.assign(parameters.size(), 0);
  plan.parameter_buckets.resize(parameters.size());
  make_arenas(parameters, world_sizes, options.layout, plan);
  std::set<const ParameterLayout*> layouts;
  for (const Arena& arena : plan.arenas) layouts.insert(arena.layout);
  for (const ParameterLayout* layout : layouts) layout->assign_owners(parameters, options, plan);

  std::vector<Bucket> drafts;                     // before they are numbered
  std::vector<std::pair<int64_t, size_t>> order;  // ready() and the place in `drafts`
  for (int64_t a = 0; a < static_cast<int64_t>(plan.arenas.size()); ++a) {
    const int64_t bucket_bytes = options.bucket_bytes.value_or(
        default_bucket_bytes(plan.arenas[a].world_size, options.on_gpu));
    for (Bucket& bucket : plan.arenas[a].layout->cut(parameters, a, bucket_bytes, plan)) {
      order.emplace_back(ready(bucket, parameters), drafts.size());
      drafts.push_back(std::move(bucket));
    }
  }
  std::sort(order.begin(), order.end());
  plan.buckets.reserve(drafts.size());
  for (const auto& [last, draft] : order) {
    const auto number = static_cast<int64_t>(plan.buckets.size());
    for (const Slot& slot : drafts[draft].slots) {
      plan.parameter_buckets[slot.parameter].push_back(number);
    }
    plan.buckets.push_back(std::move(drafts[draft]));
  }
  return plan;
}

}  // namespace zero
