// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs the inner optimizer over this rank's fp32 master segments.
//
// Classes with a fused kernel run through it, bucket by bucket: one pass that
// clips, updates and writes the working row. Every other optimizer, and these
// with fused(false), runs its own step() over all segments. In a
// CombinedOptimizer each parameter group is updated as its own class says.
// State lives in the inner optimizer's state() either way.
//
// On a GPU the fused path never waits to learn whether a step is skipped: the kernels read that,
// the clip coefficient and the counts of updates from the device's memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"
#include "zero/gradients/gradient_reducer.h"
#include "zero/inner_optimizers/fused_update.h"
#include "zero/inner_optimizers/step_trap.h"
#include "zero/memory/parameter_table.h"
#include "zero/memory/segment_tensors.h"
#include "zero/memory/working_arena.h"
#include "zero/update/ema.h"
#include "zero/update/group_options.h"
#include "zero/update/master_rows.h"
#include "zero/update/step_counts.h"
#include "zero/update/step_effect.h"

namespace zero {

// The seed by which the moments of a parameter are rounded, which kernels call its number: a hash
// of its name, so that it is the same on ranks that hold other parameters beside it.
int64_t noise_number(const std::string& name);

class ShardOptimizer {
 public:
  // The objects that the segments are views of; they outlive the optimizer. `ranks[d]` is this
  // rank's number in domain d of the plan.
  struct Shards {
    const Plan& plan;
    const ParameterTable& table;
    std::vector<int64_t> ranks;
    WorkingArena& arena;
    const GradientReducer& reducer;
    BufferPool& pool;
  };

  struct Options {
    bool fused = true;  // where the kernels exist for this class of optimizer
    // Then update() learns on the device whether the step is skipped, if all groups are fused.
    bool deferred = false;
    // With deferred(): kernels read learning rates on the device, so that a CUDA graph can.
    bool rates_on_device = false;
    std::optional<EmaOptions> ema = std::nullopt;
    // Per parameter; empty: fp32. Those of classes that store no moments are fp32.
    std::vector<Moments> moments = {};
    bool split_masters = false;  // of bf16 parameters, which have fused kernels then
  };

  // Takes masters from the working parameters and replaces `inner`'s
  // parameters by them. `inner` must have passed check_inner_optimizer().
  ShardOptimizer(Shards shards, std::unique_ptr<torch::optim::Optimizer> inner, Options options);

  // They read the inner optimizer, and throw as raw_inner() does where it was lost.
  GroupOptions& groups();
  const GroupOptions& groups() const { return group_options_; }

  // What a gradient is multiplied by, after each element is clamped to [-bound, bound].
  struct Clip {
    at::Tensor bound;        // 0-dim fp32 beside the gradients; undefined: no bound
    at::Tensor coefficient;  // 0-dim double there
  };
  // One update of all buckets, until end_update(): of the segments of parameters with used[p] != 0,
  // from their clipped gradients, which may be changed. begin_update() and mark_used() come first,
  // then each bucket once. Those with is_fused() may come in any order; all others come behind
  // update_inner(), which changes them.
  //
  // `nonfinite` is 0-dim double beside the gradients. Where it is not 0, nothing changes, state,
  // counts and averages included; undefined means 0, and without deferred() that is what it must
  // be. `step` is the number of the step, for rounding moments: a number, or 0-dim double on the
  // device.
  void begin_update(const Clip& clip, const at::Tensor& nonfinite,
                    const std::variant<int64_t, at::Tensor>& step);
  void mark_used(const std::vector<uint8_t>& used);
  void end_update();
  bool is_updating() const { return group_options_.locked(); }
  // Returns whether every parameter of the bucket has a fused kernel: the same on all ranks.
  bool is_fused(int64_t bucket) const { return bucket_fused_[bucket] != 0; }
  // Runs the inner optimizer's own step() over the segments of groups without a fused kernel.
  void update_inner();
  // Updates this rank's segments of the bucket that are fused. Returns the working rows, of which
  // its own is complete.
  Rows update(int64_t bucket);
  // With ZeroOptions::update_in_backward, before mark_used() and in place of update(): of a bucket
  // of which every segment is used. prepare_early() makes their state and counts the update, and
  // update_early() launches kernels alone, on a stream that comes behind.
  void prepare_early(int64_t bucket);
  void update_early(int64_t bucket);
  // The rows that update() returns, of a bucket that went through update_early().
  Rows updated_rows(int64_t bucket) const;
  bool deferred() const { return counts_.has_value(); }
  // The problem of a step() of the inner optimizer that the user made, or nothing. Forgets it.
  std::string take_problem();

  // Sets masters from working parameters.
  void read_masters() { masters_->read_working(); }
  // Returns the working rows of a bucket, of which this rank's is made from its masters.
  Rows write_working(int64_t bucket) const;

  // The average of the masters; null without one.
  Ema* ema() { return ema_ ? &*ema_ : nullptr; }
  // Updates the average of a bucket, if there is one, from its masters: behind update().
  void update_ema(int64_t bucket) {
    if (ema_) ema_->update(bucket, masters_->values(bucket));
  }
  void restart_ema();
  // As write_working(), from the average. Masters that are in working rows are set aside until
  // restore_masters().
  Rows write_ema(int64_t bucket);
  void restore_masters() { masters_->take_back(); }
  int64_t ema_bytes() const;  // with masters that are set aside

  MasterRows& masters() { return *masters_; }
  const MasterRows& masters() const { return *masters_; }
  const std::vector<SegmentTensors>& segments() const { return segments_; }
  // With deferred() these wait for the device, to bring the state's counts up to date: not for the
  // step path, nor once per parameter.
  torch::optim::Optimizer& inner_with_counts();
  const torch::optim::Optimizer& inner_with_counts() const;
  // For those that look at classes and options alone: counts in its state may be old.
  const torch::optim::Optimizer& raw_inner() const;
  // Gives the inner optimizer away, without parameters and state, or back if no other shards could
  // be made for it. Frees masters. From then on nothing but the inner optimizer and the counts of
  // bytes may be asked for.
  std::unique_ptr<torch::optim::Optimizer> release_inner();
  void give_back_inner(std::unique_ptr<torch::optim::Optimizer> inner) {
    inner_ = std::move(inner);
  }
  // To be called after state() of the inner optimizer was changed.
  void adopt_inner_state();

  int64_t master_bytes() const { return masters_->bytes(); }
  int64_t state_bytes() const;

 private:
  const FusedUpdate* fused(int64_t group) const { return fused_[group]; }
  void make_masters(const std::vector<Moments>& moments);
  void make_ema(const EmaOptions& options);
  void replace_parameters();
  // Makes the state of a segment that is to be updated, where the device counts.
  void prepare(size_t segment);
  void count();
  // Without `own_row`, of a layout that is not in place, it updates masters alone.
  void update_fused(int64_t bucket, const at::Tensor& own_row);
  void write_counts_to_state() const;
  void check_has_inner() const;
  at::Tensor own_row(int64_t bucket, const Rows& rows) const;
  void clamp(const at::Tensor& gradients) const;
  // The shard of a bucket as kernels read it, in fp32 and clamped: in place, or a buffer of the
  // pool. give_gradients() ends it.
  at::Tensor take_gradients(int64_t bucket) const;
  void give_gradients(int64_t bucket, const at::Tensor& gradients) const;

  const Shards shards_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  GroupOptions group_options_;
  std::optional<InnerStepTrap> trap_;
  std::optional<StepEffect> effect_;
  // Per parameter group: null where the inner optimizer makes the update.
  const std::vector<const FusedUpdate*> fused_;
  bool all_fused_ = true;
  bool none_fused_ = true;
  std::vector<int64_t> noise_numbers_;  // per parameter

  std::optional<MasterRows> masters_;
  std::optional<Ema> ema_;
  std::vector<SegmentTensors> segments_;  // by bucket, then by offset
  std::vector<size_t> first_segment_;     // bucket b has [first_segment_[b], first_segment_[b+1])
  std::optional<SegmentCounts> counts_;   // updates of each segment, with deferred()
  std::vector<uint8_t> bucket_fused_;     // per bucket
  // The update that is under way.
  std::vector<uint8_t> used_;
  Clip clip_;
  at::Tensor coefficient32_, nonfinite_, device_step_;  // what scalars_ points to
  FusedScalars scalars_;
  // Of update_fused(), kept for their memory: the segments of each group, and which have any.
  std::vector<std::vector<FusedSegment>> by_group_;
  std::vector<int64_t> groups_;
};

}  // namespace zero
