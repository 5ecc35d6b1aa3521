// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/micro_batch_sums.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "kernels/cast.h"
#include "zero/gradients/local_gradients.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

// Computes an addition that was put off: in place, unless autograd or the program has a view of
// that memory, since it gives two parameters views of one gradient.
void complete(MicroBatchSums::NodeSum& sum) {
  if (!sum.added.defined()) return;
  const at::Tensor addend = std::exchange(sum.added, at::Tensor());
  const bool shared = addend.storage().use_count() > 1;
  const at::Tensor result =
      shared ? at::empty_strided(addend.sizes(), addend.strides(), addend.options()) : addend;
  kernels::cast_copy(sum.tensor.const_data_ptr(), sum.tensor.scalar_type(),
                     result.mutable_data_ptr(), at::kFloat, result.numel(), addend.const_data_ptr(),
                     current_stream(result.device()));
  sum.tensor = result;
}

at::Tensor widened(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kFloat) return tensor;
  const at::Tensor result =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().dtype(at::kFloat));
  kernels::cast_copy(tensor.const_data_ptr(), tensor.scalar_type(), result.mutable_data_ptr(),
                     at::kFloat, tensor.numel(), nullptr, current_stream(tensor.device()));
  return result;
}

// lower += upper, put off: it may be made on the way into a bucket.
void add_sums(MicroBatchSums::NodeSum& lower, MicroBatchSums::NodeSum& upper) {
  complete(lower);
  complete(upper);
  if (lower.tensor.defined() && upper.tensor.defined()) {
    lower.added = widened(lower.tensor);
    lower.tensor = upper.tensor;
  } else if (lower.tensor.defined() || upper.tensor.defined()) {
    const at::Tensor& one = lower.tensor.defined() ? lower.tensor : upper.tensor;
    lower.tensor = at::add(widened(one).detach(), 0.0);
  }
}

}  // namespace

MicroBatchSums::MicroBatchSums(const ParameterTable& table, int64_t count, int64_t rank,
                               int64_t world_size)
    : table_(table),
      tree_(count, world_size),
      rank_(rank),
      sums_(table.parameters().size(), TreeStack<NodeSum>(tree_)),
      pushed_(table.parameters().size(), 0) {}

// 1. Micro-batches that did not have the parameter. 2. This one, with the additions that it
// completes, of which the last is put off.
void MicroBatchSums::push(int64_t parameter, at::Tensor gradient) {
  check_first(parameter);
  int64_t& pushed = pushed_[parameter];
  TreeStack<NodeSum>& stack = sums_[parameter];
  while (pushed < done_) stack.push({begin() + pushed++, 1}, NodeSum(), add_sums);
  stack.push({begin() + pushed++, 1}, NodeSum{std::move(gradient), {}}, add_sums);
}

void MicroBatchSums::check_first(int64_t parameter) const {
  TORCH_CHECK(
      pushed_[parameter] <= done_, "parameter ", table_.parameters()[parameter].name,
      ": expected one gradient in micro-batch ", begin() + done_,
      ", since ZeroOptions::micro_batches adds up one of each, got a second one; add up the "
      "losses before one backward(), and do not run the layer twice by checkpointing");
}

void MicroBatchSums::add(int64_t parameter, at::Tensor gradient) {
  auto& entries = sums_[parameter].entries();
  const size_t place = entries.size();
  push(parameter, std::move(gradient));
  complete(entries.back().second);
  // Its memory stays: the next gradient is made in that of the last step.
  const bool stays =
      place < entries.size() && place < recycled_.size() && !recycled_[place].empty();
  if (stays) recycled_[place].pop_front();
}

void MicroBatchSums::recycle(int64_t parameter) {
  // The first sum of a step is not held: the next step's first gradient is made in its memory.
  if (!std::exchange(released_, true)) {
    recycled_.clear();
    return;
  }
  const auto& entries = sums_[parameter].entries();
  recycled_.resize(std::max(recycled_.size(), entries.size()));
  for (size_t place = 0; place < entries.size(); ++place) {
    const at::Tensor& sum = entries[place].second.tensor;
    if (sum.defined() && is_worth_recycling(sum)) recycled_[place].push_back(sum);
  }
}

MicroBatchSums::NodeSums MicroBatchSums::finish(int64_t parameter, const at::Tensor& gradient) {
  recycle(parameter);
  push(parameter, gradient);
  NodeSums result;
  for (auto& [node, sum] : sums_[parameter].entries()) result.push_back(std::move(sum));
  sums_[parameter].entries().clear();
  return result;
}

void MicroBatchSums::drop_all() {
  done_ = 0;
  released_ = false;
  for (auto& stack : sums_) stack.entries().clear();
  pushed_.assign(pushed_.size(), 0);
}

int64_t MicroBatchSums::bytes() const {
  int64_t bytes = 0;
  for (const auto& sums : recycled_) {
    for (const at::Tensor& sum : sums) bytes += static_cast<int64_t>(sum.nbytes());
  }
  for (const auto& stack : sums_) {
    for (const auto& [node, sum] : stack.entries()) {
      if (sum.tensor.defined()) bytes += static_cast<int64_t>(sum.tensor.nbytes());
    }
  }
  return bytes;
}

}  // namespace zero
