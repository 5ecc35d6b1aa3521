// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/shard_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include "bookkeeping/layout.h"
#include "kernels/cast.h"
#include "zero/inner/classes.h"
#include "zero/inner/registry.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/trace_range.h"

namespace zero {

ShardOptimizer::ShardOptimizer(Shards shards, std::unique_ptr<torch::optim::Optimizer> inner,
                               Options options)
    : shards_(std::move(shards)),
      inner_(std::move(inner)),
      fused_(options.fused ? adapter_of(*inner_).fused() : nullptr) {
  at::NoGradGuard no_grad;
  make_masters();
  replace_parameters();
  if (fused_ != nullptr && options.deferred) {
    counts_.emplace(static_cast<int64_t>(segments_.size()),
                    shards_.table.parameters().front().tensor.device());
  }
}

torch::optim::Optimizer& ShardOptimizer::inner() {
  give_state();
  return *inner_;
}

const torch::optim::Optimizer& ShardOptimizer::inner() const {
  give_state();
  return *inner_;
}

void ShardOptimizer::give_state() const {
  if (!counts_) return;
  const std::vector<int64_t> counts = counts_->read();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const at::Tensor& master = segments_[i].master;
    if (counts[i] == 0) {  // what it holds was never written
      inner_->state().erase(master.unsafeGetTensorImpl());
    } else {
      fused_->set_update_count(*inner_, master, counts[i]);
    }
  }
}

void ShardOptimizer::take_state() {
  if (!counts_) return;
  std::vector<int64_t> counts;
  for (const SegmentTensors& s : segments_) {
    counts.push_back(fused_->update_count(*inner_, s.master));
  }
  counts_->write(counts);
}

at::Tensor ShardOptimizer::own_row(int64_t bucket, const at::Tensor& rows) const {
  return rows.select(0, shards_.ranks[shards_.plan.domain_of(bucket)]);
}

void ShardOptimizer::make_masters() {
  const Plan& plan = shards_.plan;
  const auto count = static_cast<int64_t>(plan.buckets.size());
  for (int64_t b = 0; b < count; ++b) {
    if (shards_.arena.is_master(b)) {
      master_rows_.push_back(own_row(b, shards_.arena.rows(b)));
    } else {
      master_rows_.push_back(at::empty_like(shards_.reducer.shard(b)));
    }
    first_segment_.push_back(segments_.size());
    const int64_t rank = shards_.ranks[plan.domain_of(b)];
    for (const Segment& s : plan.segments(b, rank)) {
      segments_.push_back({s, shards_.table.parameters()[s.parameter].group,
                           master_rows_[b].narrow(0, s.offset, s.numel).detach(),
                           shards_.reducer.shard(b).narrow(0, s.offset, s.numel)});
    }
  }
  first_segment_.push_back(segments_.size());
  read_masters();
}

void ShardOptimizer::replace_parameters() {
  inner_->state().clear();
  auto& groups = inner_->param_groups();
  for (auto& group : groups) group.params().clear();
  for (const SegmentTensors& s : segments_) {
    groups[s.group].params().push_back(s.master);
    make_initial_state(*inner_, s.group, s.master);
  }
  trap_.emplace(*inner_);
  for (const auto& group : groups) pushed_.push_back(group.options().clone());
  by_group_.resize(groups.size());
}

void ShardOptimizer::read_masters() {
  for (size_t b = 0; b < master_rows_.size(); ++b) {
    const auto bucket = static_cast<int64_t>(b);
    if (shards_.arena.is_master(bucket)) continue;
    shards_.arena.read_row(bucket,
                           shards_.ranks[shards_.plan.arena_of(shards_.plan.buckets[b]).domain],
                           master_rows_[b]);
  }
}

void ShardOptimizer::push_options(const ParamGroups& groups) {
  auto& inner_groups = inner_->param_groups();
  TORCH_CHECK(groups.size() == inner_groups.size(), "expected the ", inner_groups.size(),
              " parameter groups of construction, got ", groups.size(),
              "; give all groups to the inner optimizer before making the ZeroOptimizer");
  for (size_t g = 0; g < groups.size(); ++g) {
    TORCH_CHECK(equal_options(inner_groups[g].options(), *pushed_[g]), "parameter group ", g,
                ": expected the inner optimizer's options as they were pushed, got others; "
                "change param_groups()[",
                g, "].options() of the ZeroOptimizer instead");
    inner_groups[g].set_options(groups[g].options().clone());
    pushed_[g] = groups[g].options().clone();
  }
}

void ShardOptimizer::write_row(int64_t bucket, const at::Tensor& own_row) const {
  if (shards_.arena.is_master(bucket)) return;
  const at::Tensor& master = master_rows_[bucket];
  kernels::cast_copy(master.const_data_ptr(), at::kFloat, own_row.mutable_data_ptr(),
                     own_row.scalar_type(), master.numel(), nullptr,
                     current_stream(master.device()));
}

void ShardOptimizer::count(const std::vector<uint8_t>& used, const at::Tensor& nonfinite) {
  std::vector<uint8_t> updated(segments_.size());
  for (size_t i = 0; i < segments_.size(); ++i) {
    const SegmentTensors& s = segments_[i];
    updated[i] = used[s.segment.parameter];
    // Also a momentum that was switched on later has its first update then.
    if (updated[i] != 0 && fused_->prepare_state(*inner_, s.group, s.master)) counts_->reset(i);
  }
  counts_->add(updated, nonfinite);
}

void ShardOptimizer::update_bucket(int64_t bucket, const std::vector<uint8_t>& used,
                                   const FusedScalars& scalars, const at::Tensor& own_row) {
  const bool in_place = shards_.plan.layout->in_place();
  const bool cast = in_place && !shards_.arena.is_master(bucket);
  char* row = cast ? static_cast<char*>(own_row.mutable_data_ptr()) : nullptr;
  for (auto& list : by_group_) list.clear();
  for (size_t i = first_segment_[bucket]; i < first_segment_[bucket + 1]; ++i) {
    const SegmentTensors& s = segments_[i];
    if (used[s.segment.parameter] == 0) continue;
    by_group_[s.group].push_back({&s.master, s.gradient.const_data_ptr<float>(),
                                  cast ? row + s.segment.offset * own_row.element_size() : nullptr,
                                  counts_ ? counts_->of(i) : nullptr});
  }
  for (size_t g = 0; g < by_group_.size(); ++g) {
    if (by_group_[g].empty()) continue;
    fused_->update(*inner_, static_cast<int64_t>(g), by_group_[g], scalars, own_row.scalar_type(),
                   current_stream(own_row.device()));
  }
  // A bucket assembled in a buffer also needs the rows of what was not updated.
  if (!in_place) write_row(bucket, own_row);
}

void ShardOptimizer::update_inner(const std::vector<uint8_t>& used, double coefficient) {
  for (SegmentTensors& s : segments_) {
    if (used[s.segment.parameter] == 0) {
      s.master.mutable_grad().reset();
      continue;
    }
    if (coefficient != 1.0) s.gradient.mul_(coefficient);
    s.master.mutable_grad() = s.gradient;
  }
  trap_->disarm();
  inner_->step();
  trap_->arm();
  for (SegmentTensors& s : segments_) s.master.mutable_grad().reset();
}

void ShardOptimizer::update(const std::vector<uint8_t>& used, const at::Tensor& coefficient,
                            const at::Tensor& nonfinite, const RowWritten& written) {
  at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(counts_ || !nonfinite.defined());
  // The kernels read these beside the masters.
  const at::Tensor coefficient32 = coefficient.to(at::kFloat);
  FusedScalars scalars;
  if (fused_ != nullptr) {
    scalars.coefficient = coefficient32.const_data_ptr<float>();
    if (nonfinite.defined()) scalars.nonfinite = nonfinite.const_data_ptr<double>();
    if (counts_) count(used, nonfinite);
  } else {
    const TraceRange range("update");
    update_inner(used, coefficient.item<double>());
  }
  const auto count = static_cast<int64_t>(master_rows_.size());
  // Backwards: the next forward pass needs first what backward came to last.
  for (int64_t b = count - 1; b >= 0; --b) {
    const at::Tensor rows = shards_.arena.rows(b);
    const at::Tensor own = own_row(b, rows);
    const TraceRange range("update", b);
    if (fused_ != nullptr) {
      update_bucket(b, used, scalars, own);
    } else {
      write_row(b, own);
    }
    written(b, rows);
  }
}

void ShardOptimizer::write_working(const RowWritten& written) {
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(master_rows_.size());
  for (int64_t b = 0; b < count; ++b) {
    const at::Tensor rows = shards_.arena.rows(b);
    write_row(b, own_row(b, rows));
    written(b, rows);
  }
}

int64_t ShardOptimizer::master_bytes() const {
  int64_t bytes = 0;
  for (size_t b = 0; b < master_rows_.size(); ++b) {
    if (!shards_.arena.is_master(static_cast<int64_t>(b))) {
      bytes += static_cast<int64_t>(master_rows_[b].nbytes());
    }
  }
  return bytes;
}

int64_t ShardOptimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const auto& item : inner_->state()) {
    visit_state_tensors(*item.second, [&](const char*, const at::Tensor& tensor) {
      bytes += static_cast<int64_t>(tensor.nbytes());
    });
  }
  return bytes;
}

}  // namespace zero
