// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Stage 1: the averaged gradients in full, readable as p.grad(). The second
// half of an all-reduce whose first half filled the gradient shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bookkeeping/plan.h"
#include "zero/comm/domain_communicators.h"
#include "zero/gradients/gradient_reducer.h"
#include "zero/memory/bucket_memory.h"
#include "zero/memory/parameter_table.h"

namespace zero {

class FullGradients {
 public:
  // References must outlive it. Memory is allocated by the first gather().
  FullGradients(const Plan& plan, const ParameterTable& table,
                std::vector<DomainCommunicators> comms, BufferPool& pool)
      : plan_(plan), table_(table), comms_(std::move(comms)), memory_(plan, pool) {}

  // Collective. Sets p.grad() of every parameter with used[p] != 0 to its
  // average, in the parameter's dtype, shape and strides, and marks it as such
  // in `reducer`. With a layout that is in place, a view of memory that the next gather
  // overwrites.
  void gather(GradientReducer& reducer, const std::vector<uint8_t>& used);

  // Collective. The same, unless p.grad() has these `rounds` since forget_rounds() already, or all
  // of them were dropped.
  void gather_rounds(int64_t rounds, GradientReducer& reducer, const std::vector<uint8_t>& used);
  // reduce_gradients() has been called: whatever reads p.grad() may write there, too.
  void show() { shown_rounds_ = gathered_rounds_; }
  // Throws where this rank's part of what was shown is not as it was: step() would not see it. A
  // write through p.grad().data() raises no version, as those of torch's clip_grad_norm_() and
  // clip_grad_value_(). On a CPU only, since the host would wait for another device.
  void verify(const GradientReducer& reducer) const;
  // The gradients are consumed.
  void forget_rounds() { gathered_rounds_ = shown_rounds_ = 0; }

  int64_t bytes() const;
  // Frees what the last gather() made.
  void release() {
    memory_.release();
    single_.clear();
  }

 private:
  // The tensor that p.grad() of a parameter becomes.
  at::Tensor average(int64_t parameter);

  const Plan& plan_;
  const ParameterTable& table_;
  const std::vector<DomainCommunicators> comms_;
  BucketMemory memory_;
  int64_t gathered_rounds_ = 0;     // that p.grad() contains
  int64_t shown_rounds_ = 0;        // those of the last show()
  std::vector<at::Tensor> single_;  // per parameter, of those without a place in memory_
};

}  // namespace zero
