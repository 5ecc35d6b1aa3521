// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/parameter_gathers.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "bookkeeping/layout.h"
#include "zero/base/error_text.h"
#include "zero/base/streams.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/trace_range.h"

namespace zero {
namespace {

constexpr size_t kGathersOfChanges = 4;  // under way at a time

size_t most_under_way(const Plan& plan, const ZeroOptions& options) {
  const size_t most = max_gathers(plan);
  // What is encoded has memory of its own until the gather ends.
  const bool few = options.gather_wire() == GatherWire::kChanges && !options.overlap_gather();
  return few ? std::min(most, kGathersOfChanges) : most;
}

}  // namespace

ParameterGathers::ParameterGathers(const Plan& plan, ParameterTable& table, WorkingArena& arena,
                                   OptimizerCommunicators& comms, const ZeroOptions& options)
    : plan_(plan),
      table_(table),
      arena_(arena),
      comms_(comms),
      options_(options),
      before_(plan.buckets.size()),
      gathers_(plan.buckets.size()),
      waited_(plan.buckets.size()),
      most_(most_under_way(plan, options)) {}

bool ParameterGathers::sends_changes(int64_t bucket) {
  if (options_.gather_wire() != GatherWire::kChanges) return false;
  const Arena& arena = plan_.arena_of(plan_.buckets[bucket]);
  // Elsewhere no rank has the rows of others between steps.
  if (!arena.layout->in_place()) return false;
  const at::Tensor values = arena_.rows(bucket).values();
  return RowCommunicator(ranks_of(bucket)).sends_changes(values.scalar_type(), values.device());
}

void ParameterGathers::begin() {
  under_way_.clear();
  changed_.clear();
  for (std::optional<Waited>& waited : waited_) waited.reset();
}

void ParameterGathers::keep(int64_t bucket) {
  if (!sends_changes(bucket)) return;
  before_[bucket] = arena_.rows(bucket).row(ranks_of(bucket).rank()).clone();
}

void ParameterGathers::start(int64_t bucket, const Rows& rows) {
  if (under_way_.size() == most_) {
    wait(under_way_.front());
    under_way_.pop_front();
  }
  under_way_.push_back(bucket);
  const std::string label = "parameter bucket " + std::to_string(bucket);
  Pending gather = RowCommunicator(ranks_of(bucket))
                       .gather_rows(rows, label, std::exchange(before_[bucket], {}));
  gathers_[bucket] = Pending([this, bucket, rows, gather = std::move(gather)]() mutable {
    const TraceRange range("gather", bucket);
    gather.wait();
    publish(bucket, rows);
  });
}

bool ParameterGathers::is_under_way(int64_t parameter) const {
  if (changed_.empty() || changed_[parameter] == 0) return false;
  const std::vector<int64_t>& buckets = plan_.parameter_buckets[parameter];
  return std::ranges::any_of(buckets,
                             [&](int64_t b) { return gathers_[b].valid() && may_be_late(b); });
}

bool ParameterGathers::may_be_late(int64_t bucket) const {
  return comms_.domains[plan_.domain_of(bucket)].data->world_size() > 1 ||
         !plan_.layout_of(plan_.buckets[bucket]).in_place();
}

void ParameterGathers::publish(int64_t bucket, const Rows& rows) {
  const bool step_is_over = !changed_.empty();
  arena_.publish(bucket, rows, /*only_remembered=*/step_is_over);
  if (!step_is_over) return;
  for (const Slot& slot : plan_.buckets[bucket].slots) {
    if (may_be_late(bucket) && !table_.is_as_remembered(slot.parameter)) {
      problem_ = "parameter " + table_.parameters()[slot.parameter].name +
                 ": expected wait_for(module) before it is loaded, edited in place or given other "
                 "memory, since overlap_gather lets step() return while new values are received, "
                 "got a change before they were there; make the change again, and call "
                 "refresh_master_parameters()";
    }
    if (changed_[slot.parameter] != 0) table_.bump_version(slot.parameter);
  }
}

void ParameterGathers::wait(int64_t bucket) {
  // On a device the current stream waits. With overlap_gather another one may come later.
  const c10::Device device = arena_.device();
  const bool streams = overlap() && has_streams(device);
  std::optional<Waited>& waited = waited_[bucket];
  if (gathers_[bucket].valid()) {
    gathers_[bucket].wait();
    if (!streams) return;
    const c10::Stream here = current_torch_stream(device);
    waited.emplace(Waited{here, c10::Event(here.device_type())});
    waited->done.record(here);
  } else if (waited && !is_capturing(device)) {
    const c10::Stream here = current_torch_stream(device);
    if (here != waited->by) waited->done.block(here);
  }
}

void ParameterGathers::finish() {
  for (int64_t b = 0; b < std::ssize(gathers_); ++b) wait(b);
}

void ParameterGathers::finish_that_of(const at::Tensor& parameter) {
  for (const int64_t b : plan_.parameter_buckets[table_.index_or_throw(parameter)]) wait(b);
}

void ParameterGathers::finish_those_of(const torch::nn::Module& module) {
  // Each layer of a forward pass asks, and most of them when all is there.
  const bool is_there =
      std::ranges::none_of(gathers_, &Pending::valid) &&
      std::ranges::none_of(waited_, [](const auto& waited) { return waited.has_value(); });
  if (is_there) return;
  for (const int64_t parameter : table_.managed_by(module)) {
    for (const int64_t b : plan_.parameter_buckets[parameter]) wait(b);
  }
}

}  // namespace zero
