// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace zero {
namespace {

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t alignment(c10::ScalarType dtype) {
  return kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype));
}

// A bucket before it is numbered: `ready` is the position, in reverse
// registration order, of the last parameter it waits for.
struct Draft {
  Bucket bucket;
  int64_t ready = 0;
};

void check_arguments(c10::ArrayRef<ParameterInfo> parameters, c10::ArrayRef<int64_t> world_sizes,
                     const PlanOptions& options) {
  TORCH_CHECK(options.bucket_bytes.value_or(0) >= 0, "bucket_bytes: expected 0 or more, got ",
              *options.bucket_bytes);
  for (int64_t world_size : world_sizes) {
    TORCH_CHECK(world_size >= 1, "world size: expected 1 or more, got ", world_size);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterInfo& info = parameters[i];
    TORCH_CHECK(info.numel >= 0, "parameter ", i, ": expected 0 or more elements, got ",
                info.numel);
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
                 Plan& plan) {
  std::map<std::pair<c10::ScalarType, int64_t>, int64_t> index;
  plan.parameter_arena.assign(parameters.size(), 0);
  for (int64_t i = static_cast<int64_t>(parameters.size()) - 1; i >= 0; --i) {
    const ParameterInfo& info = parameters[i];
    auto [found, added] = index.try_emplace({info.dtype, info.domain}, plan.arenas.size());
    if (added) {
      plan.arenas.push_back({info.dtype, info.domain, world_sizes[info.domain], 0, 0, {}});
    }
    Arena& arena = plan.arenas[found->second];
    arena.parameters.push_back(i);
    arena.parameter_numel += info.numel;
    plan.parameter_arena[i] = found->second;
  }
}

// Buckets are cut every `target` elements of the arena; the last one takes what
// is left, padded to whole aligned rows.
void cut_contiguous(c10::ArrayRef<ParameterInfo> parameters, int64_t arena_index,
                    int64_t bucket_bytes, Plan& plan, std::vector<Draft>& drafts) {
  Arena& arena = plan.arenas[arena_index];
  const int64_t align = alignment(arena.dtype);
  const int64_t unit = arena.world_size * align;
  int64_t end = 0;
  for (int64_t p : arena.parameters) {
    plan.parameter_offset[p] = end;
    end += round_up(parameters[p].numel, align);
  }
  arena.numel = round_up(end, unit);
  const int64_t element = static_cast<int64_t>(c10::elementSize(arena.dtype));
  const int64_t target =
      bucket_bytes == 0 ? arena.numel : std::max(unit, round_up(bucket_bytes / element, unit));
  size_t next = 0;  // position in arena.parameters of the first one not fully placed
  for (int64_t begin = 0; begin < arena.numel; begin += target) {
    const int64_t numel = std::min(target, arena.numel - begin);
    Draft draft{{arena_index, begin, numel / arena.world_size, {}}, 0};
    while (next < arena.parameters.size()) {
      const int64_t p = arena.parameters[next];
      const int64_t start = plan.parameter_offset[p];
      const int64_t stop = start + parameters[p].numel;
      if (start >= begin + numel) break;
      const int64_t from = std::max(start, begin), to = std::min(stop, begin + numel);
      if (to > from) {
        draft.bucket.slots.push_back({p, from - start, to - from, from - begin, 0});
        draft.ready = std::max(draft.ready, static_cast<int64_t>(parameters.size()) - 1 - p);
      }
      if (stop > begin + numel) break;
      ++next;
    }
    drafts.push_back(std::move(draft));
  }
}

// Rows grow parameter by parameter and a bucket ends once it is large enough: a
// parameter is never cut.
void cut_per_parameter(c10::ArrayRef<ParameterInfo> parameters, int64_t arena_index,
                       int64_t bucket_bytes, Plan& plan, std::vector<Draft>& drafts) {
  Arena& arena = plan.arenas[arena_index];
  const int64_t align = alignment(arena.dtype);
  const int64_t element = static_cast<int64_t>(c10::elementSize(arena.dtype));
  Draft draft{{arena_index, 0, 0, {}}, 0};
  auto finish = [&] {
    if (draft.bucket.slots.empty()) return;
    arena.numel += draft.bucket.row_numel * arena.world_size;
    drafts.push_back(std::move(draft));
    draft = Draft{{arena_index, arena.numel, 0, {}}, 0};
  };
  for (int64_t p : arena.parameters) {
    const int64_t numel = parameters[p].numel;
    if (numel == 0) continue;
    const int64_t chunk = (numel + arena.world_size - 1) / arena.world_size;
    draft.bucket.slots.push_back({p, 0, numel, draft.bucket.row_numel, chunk});
    draft.bucket.row_numel += round_up(chunk, align);
    draft.ready = static_cast<int64_t>(parameters.size()) - 1 - p;
    const int64_t bytes = draft.bucket.row_numel * arena.world_size * element;
    if (bucket_bytes != 0 && bytes >= bucket_bytes) finish();
  }
  finish();
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

}  // namespace

std::vector<Piece> Plan::pieces(const Bucket& bucket, const Slot& slot) const {
  if (layout == Layout::kContiguous) return {{slot.begin, slot.offset, slot.numel}};
  std::vector<Piece> result;
  for (int64_t row = 0; row * slot.chunk < slot.numel; ++row) {
    const int64_t begin = row * slot.chunk;
    result.push_back(
        {begin, row * bucket.row_numel + slot.offset, std::min(slot.chunk, slot.numel - begin)});
  }
  return result;
}

std::vector<Segment> Plan::segments(int64_t bucket_index, int64_t rank) const {
  const Bucket& bucket = buckets[bucket_index];
  std::vector<Segment> result;
  for (const Slot& slot : bucket.slots) {
    int64_t begin = 0, end = 0, offset = 0;
    if (layout == Layout::kContiguous) {
      const int64_t row_begin = rank * bucket.row_numel;
      const int64_t from = std::max(slot.offset, row_begin);
      const int64_t to = std::min(slot.offset + slot.numel, row_begin + bucket.row_numel);
      begin = slot.begin + from - slot.offset;
      end = slot.begin + to - slot.offset;
      offset = from - row_begin;
    } else {
      begin = std::min(slot.numel, rank * slot.chunk);
      end = std::min(slot.numel, begin + slot.chunk);
      offset = slot.offset;
    }
    if (end > begin) result.push_back({slot.parameter, begin, end - begin, bucket_index, offset});
  }
  return result;
}

uint64_t Plan::fingerprint() const {
  Hash hash;
  hash.add(static_cast<int64_t>(layout));
  for (const Arena& arena : arenas) {
    hash.add(static_cast<int64_t>(arena.dtype));
    for (int64_t value : {arena.domain, arena.world_size, arena.numel}) hash.add(value);
    for (int64_t p : arena.parameters) hash.add(p);
  }
  for (const Bucket& bucket : buckets) {
    for (int64_t value : {bucket.arena, bucket.begin, bucket.row_numel}) hash.add(value);
    for (const Slot& slot : bucket.slots) {
      for (int64_t value : {slot.parameter, slot.begin, slot.numel, slot.offset, slot.chunk}) {
        hash.add(value);
      }
    }
  }
  return hash.value();
}

int64_t default_bucket_bytes(int64_t world_size) {
  constexpr int64_t kRow = int64_t{256} << 10;
  constexpr int64_t kLeast = int64_t{4} << 20;
  constexpr int64_t kMost = int64_t{64} << 20;
  return std::clamp(kRow * world_size, kLeast, kMost);
}

Plan make_plan(c10::ArrayRef<ParameterInfo> parameters, c10::ArrayRef<int64_t> world_sizes,
               const PlanOptions& options) {
  check_arguments(parameters, world_sizes, options);
  Plan plan;
  plan.layout = options.layout;
  plan.parameter_offset.assign(parameters.size(), 0);
  plan.parameter_buckets.resize(parameters.size());
  make_arenas(parameters, world_sizes, plan);

  std::vector<Draft> drafts;
  for (int64_t a = 0; a < static_cast<int64_t>(plan.arenas.size()); ++a) {
    const int64_t bucket_bytes =
        options.bucket_bytes.value_or(default_bucket_bytes(plan.arenas[a].world_size));
    if (options.layout == Layout::kContiguous) {
      cut_contiguous(parameters, a, bucket_bytes, plan, drafts);
    } else {
      cut_per_parameter(parameters, a, bucket_bytes, plan, drafts);
    }
  }
  std::stable_sort(drafts.begin(), drafts.end(),
                   [](const Draft& a, const Draft& b) { return a.ready < b.ready; });
  for (Draft& draft : drafts) {
    const auto number = static_cast<int64_t>(plan.buckets.size());
    for (const Slot& slot : draft.bucket.slots) {
      plan.parameter_buckets[slot.parameter].push_back(number);
    }
    plan.buckets.push_back(std::move(draft.bucket));
  }
  return plan;
}

}  // namespace zero
