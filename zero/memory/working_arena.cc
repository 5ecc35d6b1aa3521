// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/working_arena.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {
WorkingArena::WorkingArena(const Plan& plan, const ParameterTable& table, BufferPool& pool)
    : plan_(plan), table_(table), memory_(plan, pool) {
  memory_.allocate();
  attach();
}

void WorkingArena::attach(bool keep_values) {
  for (size_t i = 0; i < table_.parameters().size(); ++i) {
    const Parameter& p = table_.parameters()[i];
    if (plan_.layout == Layout::kPerParameter) {
      TORCH_CHECK(p.tensor.is_non_overlapping_and_dense(), "parameter ", p.name,
                  ": expected dense memory, got strides ", p.tensor.strides(), " for shape ",
                  p.tensor.sizes(), "; use Layout::kContiguous or make it contiguous");
      if (p.tensor.numel() > 1 && p.tensor.strides() != at::IntArrayRef(p.strides)) {
        at::Tensor ordered = at::empty_strided(p.sizes, p.strides, p.tensor.detach().options());
        ordered.copy_(p.tensor.detach());
        at::Tensor(p.tensor).set_data(ordered);
      }
      continue;
    }
    at::Tensor place = memory_.place(static_cast<int64_t>(i), p.tensor.sizes(), p.strides);
    if (p.tensor.numel() > 0 && p.tensor.const_data_ptr() == place.const_data_ptr()) continue;
    if (keep_values) place.copy_(p.tensor.detach());
    at::Tensor parameter = p.tensor;
    parameter.set_data(place);
  }
}

bool WorkingArena::is_master(int64_t bucket) const {
  return plan_.layout == Layout::kContiguous &&
         plan_.arena_of(plan_.buckets[bucket]).dtype == at::kFloat;
}

void WorkingArena::publish(int64_t bucket_index, const at::Tensor& rows) {
  if (plan_.layout == Layout::kContiguous) return;
  const Bucket& bucket = plan_.buckets[bucket_index];
  std::vector<at::Tensor> tensors;
  for (const Slot& slot : bucket.slots) {
    tensors.push_back(table_.parameters()[slot.parameter].tensor);
  }
  copy_out_of_bucket(plan_, bucket, rows, tensors);
  memory_.release(rows);
}

void WorkingArena::read_row(int64_t bucket, int64_t rank, const at::Tensor& row) const {
  row.zero_();
  for (const Segment& s : plan_.segments(bucket, rank)) {
    const at::Tensor& tensor = table_.parameters()[s.parameter].tensor;
    const auto* source =
        static_cast<const char*>(tensor.const_data_ptr()) + s.begin * tensor.element_size();
    kernels::cast_copy(source, tensor.scalar_type(), row.mutable_data_ptr<float>() + s.offset,
                       at::kFloat, s.numel, nullptr, current_stream(row.device()));
  }
}

std::vector<at::Tensor> WorkingArena::broadcast_tensors() const {
  if (plan_.layout == Layout::kContiguous) return memory_.flat();
  std::vector<at::Tensor> result;
  for (const Parameter& p : table_.parameters()) {
    result.push_back(
        p.tensor.detach().as_strided({p.tensor.numel()}, {1}, p.tensor.storage_offset()));
  }
  return result;
}

}  // namespace zero
