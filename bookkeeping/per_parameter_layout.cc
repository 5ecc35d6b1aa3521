// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "bookkeeping/layout.h"

namespace zero {
namespace {

class PerParameter : public ParameterLayout {
 public:
  Layout id() const override { return Layout::kPerParameter; }
  const char* name() const override { return "per parameter"; }
  bool in_place() const override { return false; }

  // Rows grow parameter by parameter and a bucket ends once it is large enough: a
  // parameter is never cut.
  std::vector<Bucket> cut(c10::ArrayRef<ParameterInfo> parameters, int64_t arena_index,
                          int64_t bucket_bytes, Plan& plan) const override {
    Arena& arena = plan.arenas[arena_index];
    const int64_t align = alignment_of(arena.dtype);
    const int64_t element = static_cast<int64_t>(c10::elementSize(arena.dtype));
    std::vector<Bucket> buckets;
    std::vector<Slot> slots;
    int64_t row_numel = 0;
    auto finish = [&] {
      if (slots.empty()) return;
      buckets.push_back(
          {arena_index, arena.numel, {arena.world_size, row_numel}, std::exchange(slots, {})});
      arena.numel += buckets.back().rows.total();
      row_numel = 0;
    };
    for (int64_t p : arena.parameters) {
      const int64_t numel = parameters[p].numel;
      if (numel == 0) continue;
      const int64_t columns =
          round_up((numel + arena.world_size - 1) / arena.world_size, parameters[p].block);
      slots.push_back({p, 0, numel, row_numel, columns});
      row_numel += round_up(columns, align);
      const int64_t bytes = row_numel * arena.world_size * element;
      if (bucket_bytes != 0 && bytes >= bucket_bytes) finish();
    }
    finish();
    return buckets;
  }

  std::vector<Span> spans(const Bucket& bucket, const Slot& slot) const override {
    const int64_t rows = (slot.numel + slot.columns - 1) / slot.columns;
    std::vector<Span> result;
    result.reserve(rows);
    for (int64_t row = 0; row < rows; ++row) {
      result.push_back(PerParameter::span_in_row(bucket, slot, row));
    }
    return result;
  }

  Span span_in_row(const Bucket& bucket, const Slot& slot, int64_t row) const override {
    const int64_t begin = std::min(slot.numel, row * slot.columns);
    return {begin, bucket.rows.begin(row) + slot.offset,
            std::min(slot.columns, slot.numel - begin)};
  }
};

}  // namespace

const ParameterLayout& per_parameter_layout() {
  static const PerParameter layout;
  return layout;
}

}  // namespace zero
