// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/shard_optimizer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "bookkeeping/layout.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/memory/bucket_memory.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/trace_range.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zero {

namespace {

std::vector<const FusedUpdate*> fused_updates(const torch::optim::Optimizer& inner, bool wanted) {
  std::vector<const FusedUpdate*> result;
  for (int64_t g = 0; g < std::ssize(inner.param_groups()); ++g) {
    result.push_back(wanted ? adapter_of(inner, g).fused() : nullptr);
  }
  return result;
}

}  // namespace

int64_t noise_number(const std::string& name) {
  return static_cast<int64_t>(XXH3_64bits(name.data(), name.size()));
}

ShardOptimizer::ShardOptimizer(Shards shards, std::unique_ptr<torch::optim::Optimizer> inner,
                               Options options)
    : shards_(std::move(shards)),
      inner_(std::move(inner)),
      group_options_(*inner_, shards_.arena.device()),
      fused_(fused_updates(*inner_, options.fused)) {
  at::NoGradGuard no_grad;
  for (const FusedUpdate* fused : fused_) (fused == nullptr ? all_fused_ : none_fused_) = false;
  for (const Parameter& p : shards_.table.parameters()) {
    noise_numbers_.push_back(noise_number(p.name));
  }
  for (const Bucket& bucket : shards_.plan.buckets) {
    // By all slots, not by those of this rank: ranks gather buckets in one order.
    bucket_fused_.push_back(std::ranges::all_of(bucket.slots, [&](const Slot& s) {
      return fused(shards_.table.parameters()[s.parameter].group) != nullptr;
    }));
  }
  masters_.emplace(shards_.plan, shards_.ranks, shards_.arena, options.split_masters);
  make_masters(options.moments);
  if (options.ema) make_ema(*options.ema);
  replace_parameters();
  if (all_fused_ && options.deferred) {
    counts_.emplace(static_cast<int64_t>(segments_.size()), shards_.arena.device());
    if (options.rates_on_device) group_options_.keep_rates_on_device();
  }
}

torch::optim::Optimizer& ShardOptimizer::inner_with_counts() {
  check_has_inner();
  write_counts_to_state();
  return *inner_;
}

const torch::optim::Optimizer& ShardOptimizer::inner_with_counts() const {
  check_has_inner();
  write_counts_to_state();
  return *inner_;
}

const torch::optim::Optimizer& ShardOptimizer::raw_inner() const {
  check_has_inner();
  return *inner_;
}

GroupOptions& ShardOptimizer::groups() {
  check_has_inner();
  return group_options_;
}

void ShardOptimizer::check_has_inner() const {
  TORCH_CHECK(inner_ != nullptr,
              "expected the inner optimizer, which was lost when memory ran out in a change of "
              "parameters or a recovery; make a new one");
}

// With deferred(), counts of updates are in the device's memory. The inner optimizer's state gets
// them whenever somebody looks at it.
void ShardOptimizer::write_counts_to_state() const {
  if (!counts_) return;
  const std::vector<int64_t> counts = counts_->read();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const at::Tensor& master = segments_[i].master;
    if (counts[i] == 0) {  // what it holds was never written
      inner_->state().erase(master.unsafeGetTensorImpl());
    } else {
      fused(segments_[i].group)->set_update_count(*inner_, master, counts[i]);
    }
  }
}

std::unique_ptr<torch::optim::Optimizer> ShardOptimizer::release_inner() {
  check_has_inner();
  trap_.reset();
  effect_.reset();
  counts_.reset();
  for (auto& group : inner_->param_groups()) group.params().clear();
  inner_->state().clear();
  segments_.clear();
  first_segment_.clear();
  masters_->clear();
  ema_.reset();
  return std::move(inner_);
}

std::string ShardOptimizer::take_problem() {
  if (!trap_->sprung()) return {};
  return "step() of the inner optimizer: expected step() of the ZeroOptimizer, which is what "
         "updates parameters, got a call through a pointer that was kept; nothing was updated";
}

void ShardOptimizer::adopt_inner_state() {
  if (!counts_) return;
  std::vector<int64_t> counts;
  for (const SegmentTensors& s : segments_) {
    counts.push_back(fused(s.group)->update_count(*inner_, s.master));
  }
  counts_->write(counts);
}

at::Tensor ShardOptimizer::own_row(int64_t bucket, const Rows& rows) const {
  return rows.row(shards_.ranks[shards_.plan.domain_of(bucket)]);
}

void ShardOptimizer::make_masters(const std::vector<Moments>& moments) {
  const Plan& plan = shards_.plan;
  for (int64_t b = 0; b < std::ssize(plan.buckets); ++b) {
    // Segments are 1-D pieces, or whole parameters in their shapes. Masters and gradients are views
    // of rows, so that one kernel can pass over a row.
    first_segment_.push_back(segments_.size());
    const int64_t rank = shards_.ranks[plan.domain_of(b)];
    const bool whole = plan.layout_of(plan.buckets[b]).is_whole();
    for (const Segment& s : plan.segments(b, rank)) {
      const Parameter& p = shards_.table.parameters()[s.parameter];
      const auto view = [&](const at::Tensor& row) {
        const at::Tensor segment = row.narrow(0, s.offset, s.numel);
        return whole ? segment.as_strided(p.sizes, p.strides) : segment;
      };
      const Moments stored = moments.empty() ? Moments::kFloat32 : moments[s.parameter];
      const at::Tensor& shard = shards_.reducer.shard(b);
      segments_.push_back({s, p.group, stored, view(masters_->row(b)).detach(),
                           shard.defined() ? view(shard) : at::Tensor()});
    }
  }
  first_segment_.push_back(segments_.size());
  read_masters();
}

void ShardOptimizer::make_ema(const EmaOptions& options) {
  ema_.emplace(options, std::ssize(shards_.plan.buckets),
               [this](int64_t bucket) { return masters_->values(bucket); });
  for (SegmentTensors& s : segments_) {
    s.ema = ema_->row(s.segment.bucket)
                .narrow(0, s.segment.offset, s.segment.numel)
                .as_strided(s.master.sizes(), s.master.strides());
  }
}

void ShardOptimizer::replace_parameters() {
  inner_->state().clear();
  auto& groups = inner_->param_groups();
  for (auto& group : groups) group.params().clear();
  for (const SegmentTensors& s : segments_) {
    groups[s.group].params().push_back(s.master);
    make_initial_state(*inner_, s.group, s.master);
  }
  // A step() by the user would update masters behind the working parameters.
  trap_.emplace(*inner_);
  effect_.emplace(*inner_);
  by_group_.resize(groups.size());
}

void ShardOptimizer::prepare(size_t i) {
  const SegmentTensors& s = segments_[i];
  // Also a momentum that was switched on later has its first update then.
  if (fused(s.group)->prepare_state(*inner_, s.group, s.master, s.moments)) counts_->reset(i);
}

void ShardOptimizer::count() {
  std::vector<uint8_t> updated(segments_.size());
  for (size_t i = 0; i < segments_.size(); ++i) {
    const auto& [s, group, moments, master, gradient, ema] = segments_[i];
    if (used_[s.parameter] == 0 || shards_.reducer.is_updated(s.bucket)) continue;
    prepare(i);
    updated[i] = fused(group)->uses_state(*inner_, group);
  }
  if (std::find(updated.begin(), updated.end(), 1) != updated.end()) {
    counts_->add(updated, nonfinite_);
  }
}

void ShardOptimizer::begin_update(const Clip& clip, const at::Tensor& nonfinite,
                                  const std::variant<int64_t, at::Tensor>& step) {
  at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(counts_ || !nonfinite.defined());
  used_.assign(shards_.table.parameters().size(), 1);
  clip_ = clip;
  nonfinite_ = nonfinite;
  scalars_ = FusedScalars();
  const auto* number = std::get_if<int64_t>(&step);
  device_step_ = number == nullptr ? std::get<at::Tensor>(step) : at::Tensor();
  if (ema_) number != nullptr ? ema_->begin(*number) : ema_->begin(device_step_, nonfinite);
  if (number != nullptr) scalars_.step = *number;
  if (!none_fused_) {
    // The kernels read these beside the masters.
    coefficient32_ = clip.coefficient.to(at::kFloat);
    scalars_.coefficient = coefficient32_.const_data_ptr<float>();
    if (nonfinite.defined()) scalars_.nonfinite = nonfinite.const_data_ptr<double>();
    if (number == nullptr) scalars_.device_step = device_step_.const_data_ptr<double>();
    group_options_.send_rates();
  }
  group_options_.set_locked(true);
}

void ShardOptimizer::mark_used(const std::vector<uint8_t>& used) {
  at::NoGradGuard no_grad;
  used_ = used;
  if (counts_) count();
}

void ShardOptimizer::end_update() { group_options_.set_locked(false); }

void ShardOptimizer::update_inner() {
  at::NoGradGuard no_grad;
  const TraceRange range("update");
  // The inner optimizer reads grad(), so that the clip coefficient is multiplied in before: one
  // pass more. A host that can read it without waiting saves the pass where nothing is clipped.
  const at::Tensor& coefficient = clip_.coefficient;
  const bool clips = !coefficient.is_cpu() || coefficient.item<double>() != 1.0;
  for (SegmentTensors& s : segments_) {
    if (used_[s.segment.parameter] == 0 || fused(s.group) != nullptr) {
      s.master.mutable_grad().reset();
      continue;
    }
    const at::Tensor gradient = s.gradient.to(at::kFloat);  // fp32: the shard itself
    clamp(gradient);
    if (clips) gradient.mul_(coefficient);
    s.master.mutable_grad() = gradient;
    // torch makes state where there is none, and no part of it that a load left out, or that an
    // option needs which is set later.
    const OptimizerAdapter& adapter = adapter_of(*inner_, s.group);
    const auto state = inner_->state().find(s.master.unsafeGetTensorImpl());
    if (state != inner_->state().end() && state->second) {
      adapter.complete_state(*state->second, inner_->param_groups()[s.group].options(), s.master);
    }
    if (s.moments == Moments::kFloat32) continue;
    // Only where all groups are fused the host does not know the number of a step.
    TORCH_INTERNAL_ASSERT(scalars_.device_step == nullptr);
    adapter.prepare_moments(
        *inner_, s.master, s.moments,
        {scalars_.step, noise_numbers_[s.segment.parameter], current_stream(s.master.device())});
  }
  trap_->disarm();
  effect_->begin();
  inner_->step();
  effect_->end();
  trap_->arm();
  for (SegmentTensors& s : segments_) s.master.mutable_grad().reset();
}

Rows ShardOptimizer::update(int64_t bucket) {
  at::NoGradGuard no_grad;
  const Rows rows = shards_.arena.rows(bucket);
  const at::Tensor own = own_row(bucket, rows);
  const TraceRange range("update", bucket);
  if (none_fused_) {
    masters_->write_working(bucket, own);
  } else {
    update_fused(bucket, own);
  }
  return rows;
}

void ShardOptimizer::prepare_early(int64_t bucket) {
  at::NoGradGuard no_grad;
  if (!counts_) return;
  for (size_t i = first_segment_[bucket]; i < first_segment_[bucket + 1]; ++i) prepare(i);
  counts_->add(first_segment_[bucket], first_segment_[bucket + 1]);
}

void ShardOptimizer::update_early(int64_t bucket) {
  at::NoGradGuard no_grad;
  const TraceRange range("update", bucket);
  const bool in_place = shards_.plan.layout_of(shards_.plan.buckets[bucket]).in_place();
  update_fused(bucket, in_place ? own_row(bucket, shards_.arena.rows(bucket)) : at::Tensor());
}

Rows ShardOptimizer::updated_rows(int64_t bucket) const {
  const bool in_place = shards_.plan.layout_of(shards_.plan.buckets[bucket]).in_place();
  return in_place ? shards_.arena.rows(bucket) : write_working(bucket);
}

void ShardOptimizer::clamp(const at::Tensor& gradients) const {
  if (clip_.bound.defined()) gradients.clamp_(-clip_.bound, clip_.bound);
}

at::Tensor ShardOptimizer::take_gradients(int64_t bucket) const {
  const at::Tensor& shard = shards_.reducer.shard(bucket);
  at::Tensor gradients = shard;
  if (shard.scalar_type() != at::kFloat) {
    gradients = shards_.pool.acquire(shard.numel(), at::kFloat);
    convert(shard, gradients);
  }
  clamp(gradients);
  return gradients;
}

void ShardOptimizer::give_gradients(int64_t bucket, const at::Tensor& gradients) const {
  if (!gradients.is_same(shards_.reducer.shard(bucket))) shards_.pool.release(gradients);
}

void ShardOptimizer::update_fused(int64_t bucket, const at::Tensor& own_row) {
  const bool in_place = shards_.plan.layout_of(shards_.plan.buckets[bucket]).in_place();
  // The kernel writes the working values beside the masters, if they are others.
  const bool cast = in_place && !shards_.arena.is_master(bucket);
  const c10::ScalarType dtype = shards_.plan.arena_of(shards_.plan.buckets[bucket]).dtype;
  char* row = cast ? static_cast<char*>(own_row.mutable_data_ptr()) : nullptr;
  // Of all groups, which may be as many as parameters, those that the bucket has.
  for (const int64_t g : groups_) by_group_[g].clear();
  groups_.clear();
  at::Tensor gradients;  // the shard, in fp32 and clamped, once a segment needs it
  // A bucket assembled in a buffer also needs what was not updated.
  bool whole_row = !in_place && own_row.defined();
  for (size_t i = first_segment_[bucket]; i < first_segment_[bucket + 1]; ++i) {
    const SegmentTensors& s = segments_[i];
    if (fused(s.group) == nullptr) whole_row = true;
    if (used_[s.segment.parameter] == 0 || fused(s.group) == nullptr) continue;
    if (!gradients.defined()) gradients = take_gradients(bucket);
    if (by_group_[s.group].empty()) groups_.push_back(s.group);
    by_group_[s.group].push_back({&s.master, gradients.const_data_ptr<float>() + s.segment.offset,
                                  cast ? row + s.segment.offset * own_row.element_size() : nullptr,
                                  counts_ ? counts_->of(i) : nullptr, s.moments,
                                  noise_numbers_[s.segment.parameter], s.segment.begin,
                                  masters_->lower(s.segment)});
  }
  // One kernel for each parameter group of the bucket, over all its segments.
  for (const int64_t g : groups_) {
    scalars_.lr = group_options_.rate_of(g);
    fused(g)->update(*inner_, g, by_group_[g], scalars_, dtype,
                     current_stream(shards_.arena.device()));
  }
  if (gradients.defined()) give_gradients(bucket, gradients);
  if (whole_row) masters_->write_working(bucket, own_row);
}

Rows ShardOptimizer::write_working(int64_t bucket) const {
  at::NoGradGuard no_grad;
  const Rows rows = shards_.arena.rows(bucket);
  masters_->write_working(bucket, own_row(bucket, rows));
  return rows;
}

Rows ShardOptimizer::write_ema(int64_t bucket) {
  at::NoGradGuard no_grad;
  const Rows rows = shards_.arena.rows(bucket);
  masters_->set_aside(bucket);
  convert(ema_->row(bucket), own_row(bucket, rows));
  return rows;
}

void ShardOptimizer::restart_ema() {
  ema_->restart([this](int64_t bucket) { return masters_->values(bucket); });
}

int64_t ShardOptimizer::ema_bytes() const {
  return masters_->bytes_aside() + (ema_ ? ema_->bytes() : 0);
}

int64_t ShardOptimizer::state_bytes() const {
  int64_t bytes = 0;
  if (!inner_) return bytes;
  for (const SegmentTensors& s : segments_) {  // not the trap, whose state is no parameter's
    const auto found = inner_->state().find(s.master.unsafeGetTensorImpl());
    if (found == inner_->state().end()) continue;
    adapter_of(*found->second)
        .visit_tensors(*found->second, [&](const char*, const at::Tensor& tensor) {
          bytes += static_cast<int64_t>(tensor.nbytes());
        });
  }
  return bytes;
}

}  // namespace zero
