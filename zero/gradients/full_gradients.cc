// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/full_gradients.h"

#include <ATen/ops/empty_strided.h>

#include <deque>
#include <string>
#include <utility>

#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

// Of Layout::kPerParameter, where each bucket has a buffer of its own until its gather is done.
constexpr size_t kBuffers = 4;

struct Gather {
  int64_t bucket;
  at::Tensor rows;
  Pending pending;
};

}  // namespace

void FullGradients::gather(GradientReducer& reducer, const std::vector<uint8_t>& used) {
  memory_.allocate();
  const bool buffered = plan_.layout == Layout::kPerParameter;
  std::deque<Gather> under_way;
  const auto finish_front = [&] {
    Gather gather = std::move(under_way.front());
    under_way.pop_front();
    gather.pending.wait();
    if (buffered) copy_out(gather.bucket, gather.rows, used);
  };
  const auto count = static_cast<int64_t>(plan_.buckets.size());
  for (int64_t b = 0; b < count; ++b) {
    if (buffered && under_way.size() == kBuffers) finish_front();
    const at::Tensor rows = memory_.rows(b);
    Communicator& group = *links_[plan_.arena_of(plan_.buckets[b]).domain].data;
    const at::Tensor own = rows.select(0, group.rank());
    const at::Tensor& shard = reducer.shard(b);
    kernels::cast_copy(shard.const_data_ptr(), at::kFloat, own.mutable_data_ptr(),
                       own.scalar_type(), own.numel(), nullptr, current_stream(own.device()));
    under_way.push_back(
        {b, rows, group.gather_rows(rows, "averaged gradient bucket " + std::to_string(b))});
  }
  while (!under_way.empty()) finish_front();
  give_views(reducer, used);
}

void FullGradients::copy_out(int64_t bucket_index, const at::Tensor& rows,
                             const std::vector<uint8_t>& used) {
  const Bucket& bucket = plan_.buckets[bucket_index];
  single_.resize(table_.parameters().size());
  std::vector<at::Tensor> tensors(bucket.slots.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t parameter = bucket.slots[i].parameter;
    if (used[parameter] == 0) continue;
    const Parameter& p = table_.parameters()[parameter];
    at::Tensor& single = single_[parameter];
    if (!single.defined()) {
      single =
          at::empty_strided(p.tensor.sizes(), p.strides, p.tensor.options().requires_grad(false));
    }
    tensors[i] = single;
  }
  copy_out_of_bucket(plan_, bucket, rows, tensors);
  memory_.release(rows);
}

void FullGradients::give_views(GradientReducer& reducer, const std::vector<uint8_t>& used) {
  for (size_t i = 0; i < table_.parameters().size(); ++i) {
    if (used[i] == 0) continue;
    const Parameter& p = table_.parameters()[i];
    at::Tensor tensor = p.tensor;
    if (plan_.layout == Layout::kContiguous) {
      // Detached, since torch's zero_grad() cannot detach a view in place.
      tensor.mutable_grad() =
          memory_.place(static_cast<int64_t>(i), p.tensor.sizes(), p.strides).detach();
    } else if (p.tensor.numel() > 0) {
      tensor.mutable_grad() = single_[i];
    } else {
      tensor.mutable_grad() =
          at::empty_strided(p.tensor.sizes(), p.strides, p.tensor.options().requires_grad(false));
    }
    reducer.mark_averaged(static_cast<int64_t>(i));
  }
}

int64_t FullGradients::bytes() const {
  int64_t bytes = memory_.bytes();
  for (const at::Tensor& single : single_) {
    if (single.defined()) bytes += static_cast<int64_t>(single.nbytes());
  }
  return bytes;
}

}  // namespace zero
