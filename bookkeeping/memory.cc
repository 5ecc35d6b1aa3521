// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/memory.h"

#include <vector>

#include "bookkeeping/layout.h"

namespace zero {

Moments moments_of_parameter(Moments asked, int64_t numel) {
  constexpr int64_t kSmall = 4096;
  return numel < kSmall ? Moments::kFloat32 : asked;
}

int64_t moment_bytes(Moments moments, int64_t numel) {
  switch (moments) {
    case Moments::kFloat32:
      break;
    case Moments::kBFloat16:
      return 2 * numel;
    case Moments::kInt8:
      return numel + 4 * ((numel + kMomentBlock - 1) / kMomentBlock);
  }
  return 4 * numel;
}

MemoryReport expected_memory(const Plan& plan, int64_t rank, const MemoryOptions& options) {
  constexpr int64_t kFloatBytes = 4;
  MemoryReport report;
  std::vector<int64_t> numels(plan.parameter_arena.size());
  for (const Bucket& bucket : plan.buckets) {
    for (const Slot& slot : bucket.slots) numels[slot.parameter] += slot.numel;
  }
  for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
    const Bucket& bucket = plan.buckets[b];
    const Arena& arena = plan.arena_of(bucket);
    const int64_t row = rank % arena.world_size;
    const int64_t numel = bucket.rows.numel(row);
    const int64_t row_bytes = kFloatBytes * numel;
    if (!options.update_in_backward) {
      report.gradient_shards +=
          static_cast<int64_t>(c10::elementSize(options.gradient_shard_dtype)) * numel;
    }
    if (options.ema) report.ema += row_bytes;
    if (!arena.layout->is_master(arena)) {
      report.master_parameters += options.split_masters ? row_bytes / 2 : row_bytes;
    }
    for (const Segment& segment : plan.segments(b, row)) {
      if (!options.state_bytes) break;
      report.optimizer_state += options.state_bytes(segment.numel, numels[segment.parameter]);
    }
  }
  for (const Arena& arena : plan.arenas) {
    const auto element = static_cast<int64_t>(c10::elementSize(arena.dtype));
    const int64_t bytes = element * arena.layout->full_numel(arena);
    report.working_parameters += bytes;
    if (options.stage == 1 && !options.update_in_backward) report.full_gradients += bytes;
  }
  return report;
}

}  // namespace zero
