// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "bookkeeping/layout.h"

namespace zero {
namespace {

class Contiguous : public ParameterLayout {
 public:
  Layout id() const override { return Layout::kContiguous; }
  const char* name() const override { return "contiguous"; }
  bool in_place() const override { return true; }

  // Buckets are cut every `target` elements of the arena; the last one takes what
  // is left, padded to whole aligned rows.
  std::vector<Bucket> cut(c10::ArrayRef<ParameterInfo> parameters, int64_t arena_index,
                          int64_t bucket_bytes, Plan& plan) const override {
    Arena& arena = plan.arenas[arena_index];
    const int64_t align = alignment_of(arena.dtype);
    int64_t longest = align;  // powers of two, so that it is a multiple of all blocks
    int64_t end = 0;
    for (int64_t p : arena.parameters) {
      plan.parameter_offset[p] = round_up(end, std::max(align, parameters[p].block));
      end = plan.parameter_offset[p] + round_up(parameters[p].numel, align);
      longest = std::max(longest, parameters[p].block);
    }
    const int64_t unit = arena.world_size * longest;
    arena.numel = round_up(end, unit);
    const int64_t element = static_cast<int64_t>(c10::elementSize(arena.dtype));
    const int64_t target =
        bucket_bytes == 0 ? arena.numel : std::max(unit, round_up(bucket_bytes / element, unit));
    std::vector<Bucket> buckets;
    size_t next = 0;  // position in arena.parameters of the first one not fully placed
    for (int64_t begin = 0; begin < arena.numel; begin += target) {
      const int64_t numel = std::min(target, arena.numel - begin);
      Bucket bucket{arena_index, begin, {arena.world_size, numel / arena.world_size}, {}};
      while (next < arena.parameters.size()) {
        const int64_t p = arena.parameters[next];
        const int64_t start = plan.parameter_offset[p];
        const int64_t stop = start + parameters[p].numel;
        if (start >= begin + numel) break;
        const int64_t from = std::max(start, begin), to = std::min(stop, begin + numel);
        if (to > from) bucket.slots.push_back({p, from - start, to - from, from - begin, 0});
        if (stop > begin + numel) break;
        ++next;
      }
      buckets.push_back(std::move(bucket));
    }
    return buckets;
  }

  std::vector<Span> spans(const Bucket& /*bucket*/, const Slot& slot) const override {
    return {{slot.begin, slot.offset, slot.numel}};
  }

  Span span_in_row(const Bucket& bucket, const Slot& slot, int64_t row) const override {
    const int64_t from = std::max(slot.offset, bucket.rows.begin(row));
    const int64_t to = std::min(slot.offset + slot.numel, bucket.rows.end(row));
    return {slot.begin + from - slot.offset, from, std::max<int64_t>(to - from, 0)};
  }
};

}  // namespace

const ParameterLayout& contiguous_layout() {
  static const Contiguous layout;
  return layout;
}

}  // namespace zero
