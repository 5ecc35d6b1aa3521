// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/plan/plan_figures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "bookkeeping/layout.h"

namespace zero::examples {
namespace {

// What each rank owns, built from ranges of ranks that all own the same more.
class Owned {
 public:
  explicit Owned(int64_t ranks) : change_(ranks + 1, 0) {}
  void add(int64_t first_rank, int64_t end_rank, int64_t numel) {
    change_[first_rank] += numel;
    change_[end_rank] -= numel;
  }
  std::vector<int64_t> per_rank() const {
    std::vector<int64_t> result(change_.size() - 1);
    std::partial_sum(change_.begin(), change_.end() - 1, result.begin());
    return result;
  }

 private:
  std::vector<int64_t> change_;
};

// A slot of the contiguous layout covers whole rows but for its two ends.
void add_contiguous(const Bucket& bucket, const Slot& slot, Owned& owned) {
  const int64_t row = bucket.rows.equal_numel(), end = slot.offset + slot.numel;
  const int64_t first = slot.offset / row, last = (end - 1) / row;
  if (first == last) {
    owned.add(first, first + 1, slot.numel);
    return;
  }
  owned.add(first, first + 1, (first + 1) * row - slot.offset);
  owned.add(first + 1, last, row);
  owned.add(last, last + 1, end - last * row);
}

// One of the other layout is a chunk for each rank until it ends.
void add_per_parameter(const Slot& slot, Owned& owned) {
  const int64_t whole = slot.numel / slot.chunk, rest = slot.numel % slot.chunk;
  owned.add(0, whole, slot.chunk);
  if (rest > 0) owned.add(whole, whole + 1, rest);
}

int64_t element_bytes(const Arena& arena) {
  return static_cast<int64_t>(c10::elementSize(arena.dtype));
}

int64_t hops(int64_t world_size) { return std::bit_width(static_cast<uint64_t>(world_size - 1)); }

// What `calls` collectives over a bucket send.
void add_traffic(const Plan& plan, const Bucket& bucket, int64_t calls, PlanFigures& figures) {
  const int64_t world_size = plan.arena_of(bucket).world_size;
  if (world_size == 1) return;
  const int64_t row_bytes = bucket.rows.equal_numel() * element_bytes(plan.arena_of(bucket));
  figures.collective_calls += calls;
  figures.bytes_sent += calls * (world_size - 1) * row_bytes;
  figures.ring_messages += calls * (world_size - 1);
  figures.tree_messages += calls * hops(world_size);
  figures.pair_messages += calls * (world_size - 1);
}

}  // namespace

Plan plan_job(const ModelShape& model, const JobOptions& options) {
  const int64_t spread = options.expert_parallel;
  TORCH_CHECK(spread >= 1 && options.world_size % spread == 0,
              "expert_parallel: expected a divisor of ", options.world_size, " ranks, got ",
              spread);
  TORCH_CHECK(spread == 1 || (model.experts > 0 && model.experts % spread == 0),
              "expert_parallel: expected a divisor of the model's ", model.experts,
              " experts, got ", spread);
  std::vector<ParameterInfo> parameters;
  int64_t expert_parameters = 0;
  for (const ParameterShape& parameter : model.parameters) {
    const bool dealt_out = parameter.expert && spread > 1;
    // Every `spread`-th tensor of a layer's experts stands for what a rank keeps of them.
    if (dealt_out && expert_parameters++ % (3 * model.experts) >= 3 * model.experts / spread) {
      continue;
    }
    parameters.push_back({parameter.numel, options.dtype, dealt_out ? 1 : 0});
  }
  std::vector<int64_t> world_sizes = {options.world_size};
  if (spread > 1) world_sizes.push_back(options.world_size / spread);
  return make_plan(parameters, world_sizes, options.plan);
}

std::vector<int64_t> owned_elements(const Plan& plan) {
  int64_t ranks = 1;
  for (const Arena& arena : plan.arenas) ranks = std::max(ranks, arena.world_size);
  std::vector<int64_t> total(ranks, 0);
  for (int64_t a = 0; a < static_cast<int64_t>(plan.arenas.size()); ++a) {
    Owned owned(plan.arenas[a].world_size);
    for (const Bucket& bucket : plan.buckets) {
      if (bucket.arena != a) continue;
      for (const Slot& slot : bucket.slots) {
        if (plan.layout->id() == Layout::kContiguous) {
          add_contiguous(bucket, slot, owned);
        } else {
          add_per_parameter(slot, owned);
        }
      }
    }
    const std::vector<int64_t> part = owned.per_rank();
    for (int64_t r = 0; r < ranks; ++r) total[r] += part[r % part.size()];
  }
  return total;
}

PlanFigures plan_figures(const Plan& plan, int64_t stage) {
  PlanFigures figures;
  for (const Arena& arena : plan.arenas) {
    figures.parameters += arena.parameter_numel;
    figures.padding += arena.numel - arena.parameter_numel;
  }
  figures.padding_share =
      static_cast<double>(figures.padding) / static_cast<double>(figures.parameters);
  figures.buckets = static_cast<int64_t>(plan.buckets.size());
  // Gradients to their owners, parameters back; stage 1 also returns averaged gradients.
  const int64_t calls = stage == 1 ? 3 : 2;
  for (const Bucket& bucket : plan.buckets) {
    figures.largest_bucket_bytes =
        std::max(figures.largest_bucket_bytes,
                 plan.bucket_numel(bucket) * element_bytes(plan.arena_of(bucket)));
    add_traffic(plan, bucket, calls, figures);
  }
  const std::vector<int64_t> owned = owned_elements(plan);
  const auto [least, most] = std::minmax_element(owned.begin(), owned.end());
  figures.least_owned = *least;
  figures.most_owned = *most;
  const double mean =
      std::accumulate(owned.begin(), owned.end(), 0.0) / static_cast<double>(owned.size());
  figures.imbalance = mean > 0 ? (static_cast<double>(*most) - mean) / mean : 0;
  MemoryOptions options;
  options.stage = stage;
  options.state_bytes = [](int64_t numel) { return 8 * numel; };  // Adam: two fp32 tensors
  figures.memory = expected_memory(plan, most - owned.begin(), options);
  return figures;
}

double communication_seconds(int64_t messages, int64_t bytes, double latency_seconds,
                             double bytes_per_second) {
  return static_cast<double>(messages) * latency_seconds +
         static_cast<double>(bytes) / bytes_per_second;
}

}  // namespace zero::examples
