// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/full_gradients.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include "kernels/cast.h"
#include "zero/device_stream.h"

namespace zero {

at::Tensor FullGradients::rows(int64_t bucket_index) {
  const Bucket& bucket = plan_.buckets[bucket_index];
  const Arena& arena = plan_.arena_of(bucket);
  const int64_t numel = plan_.bucket_numel(bucket);
  const at::Tensor flat = plan_.layout == Layout::kContiguous
                              ? flat_[bucket.arena].narrow(0, bucket.begin, numel)
                              : pool_.take(numel, arena.dtype);
  return flat.view({arena.world_size, bucket.row_numel});
}

void FullGradients::gather(GradientReducer& reducer, const std::vector<uint8_t>& used) {
  const auto options = table_.parameters().front().tensor.options().requires_grad(false);
  if (plan_.layout == Layout::kContiguous && flat_.empty()) {
    for (const Arena& arena : plan_.arenas) {
      flat_.push_back(at::zeros({arena.numel}, options.dtype(arena.dtype)));
    }
  }
  std::vector<at::Tensor> all_rows;
  std::vector<Pending> pending;
  const auto count = static_cast<int64_t>(plan_.buckets.size());
  for (int64_t b = 0; b < count; ++b) {
    const at::Tensor rows = this->rows(b);
    Communicator& group = *links_[plan_.arena_of(plan_.buckets[b]).domain].data;
    const at::Tensor own = rows.select(0, group.rank());
    const at::Tensor& shard = reducer.shard(b);
    kernels::cast_copy(shard.const_data_ptr(), at::kFloat, own.mutable_data_ptr(),
                       own.scalar_type(), own.numel(), false, current_stream(own.device()));
    pending.push_back(group.gather_rows(rows, "averaged gradient bucket " + std::to_string(b)));
    all_rows.push_back(rows);
  }
  for (int64_t b = 0; b < count; ++b) {
    pending[b].wait();
    if (plan_.layout == Layout::kPerParameter) copy_out(b, all_rows[b], used);
  }
  give_views(reducer, used);
}

void FullGradients::copy_out(int64_t bucket_index, const at::Tensor& rows,
                             const std::vector<uint8_t>& used) {
  const Bucket& bucket = plan_.buckets[bucket_index];
  single_.resize(table_.parameters().size());
  for (const Slot& slot : bucket.slots) {
    if (used[slot.parameter] == 0) continue;
    const Parameter& p = table_.parameters()[slot.parameter];
    at::Tensor& single = single_[slot.parameter];
    if (!single.defined()) {
      single =
          at::empty_strided(p.tensor.sizes(), p.strides, p.tensor.options().requires_grad(false));
    }
    for (const Piece& piece : plan_.pieces(bucket, slot)) {
      kernels::cast_copy(static_cast<const char*>(rows.const_data_ptr()) +
                             piece.bucket_begin * rows.element_size(),
                         rows.scalar_type(),
                         static_cast<char*>(single.mutable_data_ptr()) +
                             piece.parameter_begin * single.element_size(),
                         single.scalar_type(), piece.numel, false, current_stream(rows.device()));
    }
  }
  pool_.give(rows);
}

void FullGradients::give_views(GradientReducer& reducer, const std::vector<uint8_t>& used) {
  for (size_t i = 0; i < table_.parameters().size(); ++i) {
    if (used[i] == 0) continue;
    const Parameter& p = table_.parameters()[i];
    at::Tensor tensor = p.tensor;
    if (plan_.layout == Layout::kContiguous) {
      // Detached, since torch's zero_grad() cannot detach a view in place.
      tensor.mutable_grad() =
          flat_[plan_.parameter_arena[i]]
              .as_strided(p.tensor.sizes(), p.strides, plan_.parameter_offset[i])
              .detach();
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
  int64_t bytes = 0;
  for (const at::Tensor& flat : flat_) bytes += static_cast<int64_t>(flat.nbytes());
  for (const at::Tensor& single : single_) {
    if (single.defined()) bytes += static_cast<int64_t>(single.nbytes());
  }
  return bytes;
}

}  // namespace zero
