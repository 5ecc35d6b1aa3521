// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What the classes below the optimizer work on: parameters with given values, their table, their
// plan and a pool of buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bookkeeping/plan.h"
#include "tests/support/fixed_gradients.h"
#include "zero/memory/buffer_pool.h"
#include "zero/memory/parameter_table.h"

namespace zero {

// All parameters are in one group of the inner optimizer and in one domain.
struct FlatModel {
  FlatModel(const std::vector<at::Tensor>& initial, int64_t world_size, const PlanOptions& options)
      : model(initial), table(model, {torch::optim::OptimizerParamGroup(model.values)}) {
    std::vector<ParameterInfo> infos;
    for (const Parameter& p : table.parameters()) {
      infos.push_back({p.tensor.numel(), p.tensor.scalar_type(), 0});
    }
    plan = make_plan(infos, {world_size}, options);
    table.remember();
  }
  FlatModel(const FlatModel&) = delete;
  FlatModel& operator=(const FlatModel&) = delete;

  int64_t buckets() const { return static_cast<int64_t>(plan.buckets.size()); }
  int64_t row_numel(int64_t bucket) const { return plan.buckets[bucket].rows.equal_numel(); }

  GivenGradients model;
  ParameterTable table;
  Plan plan;
  BufferPool pool{at::kCPU, 1 << 20};
};

// Returns whether `grad`, a p.grad(), is the marker of a gradient that is elsewhere: one NaN that
// all elements share.
inline bool is_marker(const at::Tensor& grad) {
  bool one = grad.defined();
  for (int64_t d = 0; one && d < grad.dim(); ++d) one = grad.size(d) <= 1 || grad.stride(d) == 0;
  return one && grad.isnan().all().item<bool>();
}

// The elements of `segment` of the tensor, in fp32. `tensor` is contiguous.
inline at::Tensor part_of(const at::Tensor& tensor, const Segment& segment) {
  return tensor.detach().flatten().narrow(0, segment.begin, segment.numel).to(at::kFloat);
}

}  // namespace zero
