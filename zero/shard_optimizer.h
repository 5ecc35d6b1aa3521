// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The inner optimizer over this rank's fp32 master segments.
//
// torch's AdamW, Adam and SGD run through fused kernels, bucket by bucket: one
// pass that clips, updates and writes the working row. Every other optimizer,
// and these with fused(false), runs its own step() over all segments. State
// lives in the inner optimizer's state() either way.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/fused_update.h"
#include "zero/gradient_reducer.h"
#include "zero/parameter_table.h"
#include "zero/working_arena.h"

namespace zero {

// One segment with its tensors, 1-D of the segment's length.
struct SegmentTensors {
  Segment segment;
  int64_t group = 0;    // parameter group
  at::Tensor master;    // fp32 view of the bucket's master row
  at::Tensor gradient;  // fp32 view of the bucket's gradient shard
};

class ShardOptimizer {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
  // Receives a bucket whose own working row is complete, to be gathered.
  using RowWritten = std::function<void(int64_t bucket, const at::Tensor& rows)>;

  // What the segments are views of, with the lifetime of the optimizer.
  // `ranks[d]` is this rank's number in domain d of the plan.
  struct Shards {
    const Plan& plan;
    const ParameterTable& table;
    std::vector<int64_t> ranks;
    WorkingArena& arena;
    const GradientReducer& reducer;
  };

  // Takes masters from the working parameters and replaces `inner`'s
  // parameters by them. `inner` must have passed check_inner_optimizer().
  ShardOptimizer(Shards shards, std::unique_ptr<torch::optim::Optimizer> inner, bool fused);

  // Makes `groups`' options the inner optimizer's. Throws c10::Error when the
  // inner options are not what the last call left.
  void push_options(const ParamGroups& groups);

  // Updates the segments of parameters with used[p] != 0 from
  // coefficient * gradient, and this rank's row of every bucket's working rows.
  void update(const std::vector<uint8_t>& used, float coefficient, const RowWritten& written);

  // Masters from working parameters, and working rows from masters.
  void read_masters();
  void write_working(const RowWritten& written);

  // [row_numel] fp32.
  const at::Tensor& master_row(int64_t bucket) const { return master_rows_[bucket]; }
  const std::vector<SegmentTensors>& segments() const { return segments_; }
  torch::optim::Optimizer& inner() { return *inner_; }
  const torch::optim::Optimizer& inner() const { return *inner_; }

  int64_t master_bytes() const;  // without masters that are working rows
  int64_t state_bytes() const;

 private:
  void make_masters();
  void replace_parameters();
  void update_bucket(int64_t bucket, const std::vector<uint8_t>& used, const at::Tensor& own_row);
  void update_inner(const std::vector<uint8_t>& used, float coefficient);
  void write_row(int64_t bucket, const at::Tensor& own_row) const;
  at::Tensor own_row(int64_t bucket, const at::Tensor& rows) const;

  const Shards shards_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  const bool fused_;

  std::vector<at::Tensor> master_rows_;   // per bucket
  at::Tensor coefficient_;                // [1] fp32 beside the masters, for the fused kernels
  std::vector<SegmentTensors> segments_;  // by bucket, then by offset
  std::vector<size_t> first_segment_;     // bucket b has [first_segment_[b], first_segment_[b+1])
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> pushed_;
  std::vector<std::vector<FusedSegment>> by_group_;  // of update_bucket(), kept for its memory
};

}  // namespace zero
