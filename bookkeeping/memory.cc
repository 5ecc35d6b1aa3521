// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/memory.h"

namespace zero {

MemoryReport expected_memory(const Plan& plan, int64_t rank, const MemoryOptions& options) {
  constexpr int64_t kFloatBytes = 4;
  MemoryReport report;
  int64_t segment_numel = 0;
  for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
    const Bucket& bucket = plan.buckets[b];
    const Arena& arena = plan.arena_of(bucket);
    const bool master_is_working =
        plan.layout == Layout::kContiguous && arena.dtype == c10::ScalarType::Float;
    report.gradient_shards += kFloatBytes * bucket.row_numel;
    if (!master_is_working) report.master_parameters += kFloatBytes * bucket.row_numel;
    for (const Segment& segment : plan.segments(b, rank % arena.world_size)) {
      segment_numel += segment.numel;
    }
  }
  for (const Arena& arena : plan.arenas) {
    const auto element = static_cast<int64_t>(c10::elementSize(arena.dtype));
    const int64_t numel = plan.layout == Layout::kContiguous ? arena.numel : arena.parameter_numel;
    report.working_parameters += element * numel;
    if (options.stage == 1 && options.stage1_full_gradients) {
      report.full_gradients += element * numel;
    }
  }
  report.optimizer_state = kFloatBytes * options.state_per_element * segment_numel;
  return report;
}

}  // namespace zero
