// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/working_arena.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "kernels/cast.h"
#include "zero/device_stream.h"

namespace zero {
namespace {

const char* address(const at::Tensor& tensor, int64_t element) {
  return static_cast<const char*>(tensor.const_data_ptr()) + element * tensor.element_size();
}

char* mutable_address(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + element * tensor.element_size();
}

}  // namespace

WorkingArena::WorkingArena(const Plan& plan, const ParameterTable& table, BufferPool& pool)
    : plan_(plan), table_(table), pool_(pool) {
  if (plan.layout == Layout::kContiguous) {
    const at::Device device = table.parameters().front().tensor.device();
    for (const Arena& arena : plan.arenas) {
      flat_.push_back(
          at::zeros({arena.numel}, at::TensorOptions().dtype(arena.dtype).device(device)));
    }
  }
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
    const at::Tensor& flat = flat_[plan_.parameter_arena[i]];
    at::Tensor place = flat.as_strided(p.tensor.sizes(), p.strides, plan_.parameter_offset[i]);
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

at::Tensor WorkingArena::rows(int64_t bucket_index) {
  const Bucket& bucket = plan_.buckets[bucket_index];
  const Arena& arena = plan_.arena_of(bucket);
  const int64_t numel = plan_.bucket_numel(bucket);
  const at::Tensor flat = plan_.layout == Layout::kContiguous
                              ? flat_[bucket.arena].narrow(0, bucket.begin, numel)
                              : pool_.take(numel, arena.dtype);
  return flat.view({arena.world_size, bucket.row_numel});
}

void WorkingArena::publish(int64_t bucket_index, const at::Tensor& rows) {
  if (plan_.layout == Layout::kContiguous) return;
  const Bucket& bucket = plan_.buckets[bucket_index];
  const auto dtype = rows.scalar_type();
  std::vector<kernels::CopySpan> spans;
  for (const Slot& slot : bucket.slots) {
    const at::Tensor& tensor = table_.parameters()[slot.parameter].tensor;
    for (const Piece& piece : plan_.pieces(bucket, slot)) {
      spans.push_back({address(rows, piece.bucket_begin),
                       mutable_address(tensor, piece.parameter_begin), piece.numel});
    }
  }
  kernels::cast_copy_spans(spans, dtype, dtype, current_stream(rows.device()));
  pool_.give(rows);
}

void WorkingArena::read_row(int64_t bucket, int64_t rank, const at::Tensor& row) const {
  row.zero_();
  for (const Segment& s : plan_.segments(bucket, rank)) {
    const at::Tensor& tensor = table_.parameters()[s.parameter].tensor;
    kernels::cast_copy(address(tensor, s.begin), tensor.scalar_type(),
                       mutable_address(row, s.offset), at::kFloat, s.numel, false,
                       current_stream(row.device()));
  }
}

std::vector<at::Tensor> WorkingArena::broadcast_tensors() const {
  if (plan_.layout == Layout::kContiguous) return flat_;
  std::vector<at::Tensor> result;
  for (const Parameter& p : table_.parameters()) {
    result.push_back(
        p.tensor.detach().as_strided({p.tensor.numel()}, {1}, p.tensor.storage_offset()));
  }
  return result;
}

}  // namespace zero
