// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Adds up the gradients of this rank's micro-batches over the tree of bookkeeping/sum_tree.h, so
// that sums do not depend on the number of ranks: see ZeroOptions::micro_batches.
//
//   micro-batch 0 ... n - 2    add() for each gradient, end_micro_batch()
//   the last one               finish() for each gradient, which returns what is sent
//
// Memory is held from one step to the next as Note [memory of local sums] says (local_gradients.h),
// apart for each place in a stack, since each has sums of its own in a step.
//
// A parameter without a gradient counts as +0: x + 0 is made all the same, since it turns -0 to +0.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "bookkeeping/sum_tree.h"
#include "zero/memory/parameter_table.h"

namespace zero {

class MicroBatchSums {
 public:
  // The gradient of one node, flat in the parameter's memory order: `tensor` + `added`, which is
  // fp32, unless that is undefined. Zeros where `tensor` is undefined.
  struct NodeSum {
    at::Tensor tensor;
    at::Tensor added;
  };
  using NodeSums = c10::SmallVector<NodeSum, 1>;

  // `count` micro-batches over `world_size` ranks. `table` must outlive this.
  MicroBatchSums(const ParameterTable& table, int64_t count, int64_t rank, int64_t world_size);

  MicroBatchSums(const MicroBatchSums&) = delete;
  MicroBatchSums& operator=(const MicroBatchSums&) = delete;

  // This rank's numbers.
  int64_t begin() const { return tree_.begin(rank_); }
  int64_t end() const { return tree_.begin(rank_ + 1); }
  int64_t own() const { return end() - begin(); }
  // Complete micro-batches since drop_all().
  int64_t done() const { return done_; }
  bool is_begun() const { return done_ > 0; }
  bool is_complete() const { return done_ == own(); }
  // Returns whether the micro-batch under way, or the next one, is the last.
  bool is_last() const { return done_ + 1 == own(); }

  // The gradient of the micro-batch under way, whose memory is taken over. Throws c10::Error for a
  // second one.
  void add(int64_t parameter, at::Tensor gradient);
  // The same in the last micro-batch, without taking memory over; `gradient` is undefined where
  // there is none. Returns the sums of this rank's nodes, and forgets them.
  NodeSums finish(int64_t parameter, const at::Tensor& gradient);
  // Throws c10::Error where the micro-batch under way has a gradient of the parameter already.
  void check_first(int64_t parameter) const;
  // Returns whether there are sums of earlier micro-batches.
  bool has(int64_t parameter) const { return !sums_[parameter].entries().empty(); }
  void end_micro_batch() { ++done_; }
  // Drops all sums: the next micro-batch is the first one.
  void drop_all();
  // Frees the memory that is held.
  void free_recycled() { recycled_.clear(); }
  int64_t bytes() const;

 private:
  void push(int64_t parameter, at::Tensor gradient);
  void recycle(int64_t parameter);

  const ParameterTable& table_;
  const SumTree tree_;
  const int64_t rank_;
  int64_t done_ = 0;
  std::vector<TreeStack<NodeSum>> sums_;  // per parameter
  std::vector<int64_t> pushed_;  // per parameter: its micro-batches, those without it included
  // By place in a stack: the sums of the last step, in the order of their release.
  std::vector<std::deque<at::Tensor>> recycled_;
  bool released_ = false;  // finish() was called since drop_all()
};

}  // namespace zero
