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

// Buffers of the largest bucket that the library keeps between steps: for 8 MiB under way and as
// much that is filled meanwhile, and four more; docs/training.md has the sentence.
size_t kept_buckets(int64_t bucket_bytes) {
  constexpr int64_t kUnderWay = int64_t{8} << 20;
  const int64_t bytes = std::max<int64_t>(bucket_bytes, 1);
  return static_cast<size_t>(2 * std::max<int64_t>(2, (kUnderWay + bytes - 1) / bytes) + 4);
}

// The elements that each rank owns, built from ranges of ranks that all own the same more.
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

// One of kPerParameter has as many columns for each rank until it ends.
void add_per_parameter(const Slot& slot, Owned& owned) {
  const int64_t whole = slot.numel / slot.columns, rest = slot.numel % slot.columns;
  owned.add(0, whole, slot.columns);
  if (rest > 0) owned.add(whole, whole + 1, rest);
}

int64_t element_bytes(const Arena& arena) {
  return static_cast<int64_t>(c10::elementSize(arena.dtype));
}

int64_t hops(int64_t world_size) { return std::bit_width(static_cast<uint64_t>(world_size - 1)); }

// Elements of a row; the mean of rows that differ in length.
int64_t row_numel(const Bucket& bucket) {
  return (bucket.rows.total() + bucket.rows.count() - 1) / bucket.rows.count();
}

int64_t row_bytes(const Plan& plan, const Bucket& bucket) {
  return row_numel(bucket) * element_bytes(plan.arena_of(bucket));
}

// Parameters go back to all ranks; stage 1 also returns averaged gradients, in a step that clips.
int64_t gathers_of(int64_t stage, bool update_in_backward) {
  return stage == 1 && !update_in_backward ? 2 : 1;
}

// Adds what `calls` collectives over a bucket send in one level.
void add_traffic(const Plan& plan, const Bucket& bucket, int64_t calls, PlanFigures& figures) {
  const int64_t world_size = plan.arena_of(bucket).world_size;
  if (world_size == 1) return;
  figures.collective_calls += calls;
  figures.bytes_sent += calls * (world_size - 1) * row_bytes(plan, bucket);
}

// The ranks of one domain on the machines of a job.
struct DomainShape {
  int64_t machines = 1;            // with ranks of one group
  int64_t local = 1;               // ranks of one group on a machine
  int64_t groups_per_machine = 1;  // that share its link
  int64_t ranks() const { return machines * local; }
  bool has_two_levels() const { return machines > 1 && local > 1; }
};

DomainShape shape_of(int64_t domain_ranks, int64_t world_size, int64_t ranks_per_machine) {
  TORCH_CHECK(ranks_per_machine >= 1 && world_size % ranks_per_machine == 0,
              "ranks_per_machine: expected a divisor of ", world_size, " ranks, got ",
              ranks_per_machine);
  const int64_t groups = world_size / domain_ranks;
  TORCH_CHECK(ranks_per_machine % groups == 0 || groups % ranks_per_machine == 0,
              "ranks_per_machine: expected a divisor or a multiple of expert_parallel, ", groups,
              ", got ", ranks_per_machine);
  DomainShape shape;
  shape.groups_per_machine = std::min(groups, ranks_per_machine);
  shape.local = ranks_per_machine / shape.groups_per_machine;
  shape.machines = domain_ranks / shape.local;
  return shape;
}

// With more machines one exchange inside serves all of them, as in
// zero/comm/exchange/two_level_exchange.cc.
constexpr int64_t kFewMachines = 4;

// Messages and bytes of one collective over one bucket, of a rank.
struct Sent {
  int64_t link_messages = 0, local_messages = 0;
  int64_t machine_bytes = 0, local_bytes = 0;
  bool levels_in_turn = false;
};

// `row` and `sum` are the bytes of a row within a machine and between machines in two levels.
Sent sent_by(ExchangeAlgorithm algorithm, const DomainShape& shape, int64_t row, int64_t sum) {
  const int64_t w = shape.ranks(), h = shape.machines, l = shape.local;
  if (algorithm == ExchangeAlgorithm::kPairwise ||
      (algorithm == ExchangeAlgorithm::kTwoLevels && !shape.has_two_levels())) {
    return {w - l, l - 1, l * (w - l) * row, (l - 1) * row, false};
  }
  if (algorithm == ExchangeAlgorithm::kRing) {
    return {h - 1, w - h, h > 1 ? (w - 1) * row : 0, l > 1 ? (w - 1) * row : 0, false};
  }
  const int64_t exchanges_inside = h > kFewMachines ? 1 : h;
  Sent sent{h - 1, exchanges_inside * (l - 1), l * (h - 1) * sum, h * (l - 1) * row, true};
  if (algorithm == ExchangeAlgorithm::kTwoLevelsLog2Steps) sent.link_messages = hops(h);
  return sent;
}

void add(const Sent& sent, int64_t calls, int64_t groups_per_machine, const Machines& machines,
         ExchangeCost& cost) {
  const int64_t machine_bytes = calls * groups_per_machine * sent.machine_bytes;
  const int64_t local_bytes = calls * sent.local_bytes;
  const double link = static_cast<double>(machine_bytes) / machines.link_bytes_per_second;
  const double local = static_cast<double>(local_bytes) / machines.local_bytes_per_second;
  cost.machine_bytes += machine_bytes;
  cost.local_bytes += local_bytes;
  cost.link_messages += calls * sent.link_messages;
  cost.local_messages += calls * sent.local_messages;
  cost.wire_seconds += sent.levels_in_turn ? link + local : std::max(link, local);
  cost.latency_seconds +=
      static_cast<double>(calls * sent.link_messages) * machines.link_latency_seconds +
      static_cast<double>(calls * sent.local_messages) * machines.local_latency_seconds;
}

// The end of two pieces of work of `pieces` equal parts each, where a part of the second starts
// after the same part of the first.
double overlapped_seconds(double first, double second, int64_t pieces) {
  if (pieces == 0) return first + second;
  const auto n = static_cast<double>(pieces);
  return std::max(first + second / n, first / n + second);
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
        switch (plan.arenas[a].layout->id()) {
          case Layout::kContiguous:
            add_contiguous(bucket, slot, owned);
            break;
          case Layout::kPerParameter:
            add_per_parameter(slot, owned);
            break;
          case Layout::kWholeParameters:
            const int64_t owner = plan.parameter_owner[slot.parameter];
            owned.add(owner, owner + 1, slot.numel);
            break;
        }
      }
    }
    const std::vector<int64_t> part = owned.per_rank();
    for (int64_t r = 0; r < ranks; ++r) total[r] += part[r % part.size()];
  }
  return total;
}

PlanFigures plan_figures(const Plan& plan, MemoryOptions options) {
  PlanFigures figures;
  for (const Arena& arena : plan.arenas) {
    figures.parameters += arena.parameter_numel;
    figures.padding += arena.numel - arena.parameter_numel;
  }
  figures.padding_share =
      static_cast<double>(figures.padding) / static_cast<double>(figures.parameters);
  figures.buckets = static_cast<int64_t>(plan.buckets.size());
  const int64_t calls = 1 + gathers_of(options.stage, options.update_in_backward);
  std::vector<int64_t> sizes;
  for (const Bucket& bucket : plan.buckets) {
    sizes.push_back(plan.bucket_numel(bucket) * element_bytes(plan.arena_of(bucket)));
    add_traffic(plan, bucket, calls, figures);
  }
  std::sort(sizes.rbegin(), sizes.rend());
  figures.largest_bucket_bytes = sizes.empty() ? 0 : sizes[0];
  sizes.resize(std::min(sizes.size(), kept_buckets(figures.largest_bucket_bytes)));
  figures.kept_bucket_bytes = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const std::vector<int64_t> owned = owned_elements(plan);
  const auto [least, most] = std::minmax_element(owned.begin(), owned.end());
  figures.least_owned = *least;
  figures.most_owned = *most;
  const double mean =
      std::accumulate(owned.begin(), owned.end(), 0.0) / static_cast<double>(owned.size());
  figures.imbalance = mean > 0 ? (static_cast<double>(*most) - mean) / mean : 0;
  if (!options.state_bytes) options.state_bytes = adam_state_bytes(Moments::kFloat32);
  figures.memory = expected_memory(plan, most - owned.begin(), options);
  return figures;
}

ExchangeCost Communication::total() const {
  return {reductions.machine_bytes + gathers.machine_bytes,
          reductions.local_bytes + gathers.local_bytes,
          reductions.link_messages + gathers.link_messages,
          reductions.local_messages + gathers.local_messages,
          reductions.wire_seconds + gathers.wire_seconds,
          reductions.latency_seconds + gathers.latency_seconds};
}

Communication communication(const Plan& plan, int64_t stage, const Machines& machines,
                            ExchangeAlgorithm algorithm, bool update_in_backward) {
  constexpr int64_t kSumBytes = 4;  // fp32_machine_sums
  int64_t world_size = 1, bytes = 0;
  for (const Arena& arena : plan.arenas) world_size = std::max(world_size, arena.world_size);
  Communication result;
  for (const Bucket& bucket : plan.buckets) {
    const DomainShape shape =
        shape_of(plan.arena_of(bucket).world_size, world_size, machines.ranks_per_machine);
    const int64_t row = row_bytes(plan, bucket);
    const int64_t sum = shape.has_two_levels() ? row_numel(bucket) * kSumBytes : row;
    add(sent_by(algorithm, shape, row, sum), 1, shape.groups_per_machine, machines,
        result.reductions);
    add(sent_by(algorithm, shape, row, row), gathers_of(stage, update_in_backward),
        shape.groups_per_machine, machines, result.gathers);
    bytes += shape.ranks() * row;
    ++result.buckets;
  }
  if (result.buckets > 0) result.mean_bucket_bytes = bytes / result.buckets;
  return result;
}

double bucket_bytes_for_latency(const Communication& communication, double share) {
  const ExchangeCost total = communication.total();
  if (total.wire_seconds == 0) return 0;
  // Latency is in proportion to the number of buckets, and the time of bytes does not depend on it.
  return static_cast<double>(communication.mean_bucket_bytes) * total.latency_seconds /
         (share * total.wire_seconds);
}

Compute split_compute(double seconds) { return {seconds / 3, seconds * 2 / 3}; }

double step_seconds(const Communication& communication, const Compute& compute,
                    bool overlap_gather) {
  const double reduced = overlapped_seconds(
      compute.backward_seconds, communication.reductions.seconds(), communication.buckets);
  const double gather = communication.gathers.seconds();
  if (!overlap_gather) return compute.forward_seconds + reduced + gather;
  return reduced + overlapped_seconds(gather, compute.forward_seconds, communication.buckets);
}

}  // namespace zero::examples
