// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The fp32 masters of this rank: one row for each bucket, in one of three forms.
//
//   the working row   fp32 parameters in place: this rank's row of the arena is the master
//   its own memory    parameters of 16 bits, and layouts that are not in place
//   split             bf16 parameters in place, with ZeroOptions::split_masters: the row of the
//                     arena has the upper halves, and int16 memory the lower ones
//
// kernels/split_master.h has the formula of the halves.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/memory/segment_tensors.h"
#include "zero/memory/working_arena.h"

namespace zero {

class MasterRows {
 public:
  // `ranks[d]` is this rank's number in domain d of the plan. The plan and the arena must outlive
  // this.
  MasterRows(const Plan& plan, std::vector<int64_t> ranks, WorkingArena& arena, bool split);

  // The fp32 row that the masters of segments are views of. A split one has no memory, and is but
  // the place of its views: reading it throws.
  const at::Tensor& row(int64_t bucket) const { return rows_[bucket]; }
  bool is_split(int64_t bucket) const { return lower_[bucket].defined(); }
  // The lower halves of a segment; null where its bucket is not split.
  int16_t* lower(const Segment& segment) const;

  // The fp32 values of a bucket, or of a segment in the shape of its master: its memory, or a copy
  // where it is split.
  at::Tensor values(int64_t bucket) const;
  at::Tensor values(const SegmentTensors& segment) const;
  // Sets the masters of a segment to `elements`, fp32 on any device, in the order of their memory.
  void set(const SegmentTensors& segment, const at::Tensor& elements);
  // The working values of such masters, in fp32.
  at::Tensor rounded(const SegmentTensors& segment, const at::Tensor& elements) const;

  // Sets all masters from the working parameters.
  void read_working();
  // Makes `own_row`, this rank's row of a bucket of working parameters, from its masters.
  void write_working(int64_t bucket, const at::Tensor& own_row) const;

  // Keeps what the working row of a bucket has of its masters, until take_back().
  void set_aside(int64_t bucket);
  void take_back();
  int64_t bytes_aside() const;

  int64_t bytes() const;  // without working rows
  void clear();

 private:
  at::Tensor own_row(int64_t bucket) const;
  at::Tensor joined(int64_t bucket, int64_t begin, int64_t numel) const;

  const Plan& plan_;
  const std::vector<int64_t> ranks_;
  WorkingArena& arena_;
  std::vector<at::Tensor> rows_;         // per bucket
  std::vector<at::Tensor> lower_;        // per bucket; undefined where it is not split
  std::map<int64_t, at::Tensor> aside_;  // by bucket: copies of working rows
};

}  // namespace zero
