// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/bucket_memory.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include "bookkeeping/layout.h"
#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

const char* address(const at::Tensor& tensor, int64_t element) {
  return static_cast<const char*>(tensor.const_data_ptr()) + element * tensor.element_size();
}

char* mutable_address(const at::Tensor& tensor, int64_t element) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + element * tensor.element_size();
}

}  // namespace

void BucketMemory::allocate() {
  if (!flat_.empty()) return;
  for (const Arena& arena : plan_.arenas) {
    flat_.emplace_back();
    if (!arena.layout->in_place()) continue;
    const auto bytes = arena.numel * static_cast<int64_t>(c10::elementSize(arena.dtype));
    flat_.back() = pool_.allocate(bytes).zero_().view(arena.dtype);
  }
}

Rows BucketMemory::rows(int64_t bucket_index) {
  const Bucket& bucket = plan_.buckets[bucket_index];
  const Arena& arena = plan_.arena_of(bucket);
  const int64_t numel = plan_.bucket_numel(bucket);
  const at::Tensor values = arena.layout->in_place()
                                ? flat_[bucket.arena].narrow(0, bucket.begin, numel)
                                : pool_.acquire(numel, arena.dtype);
  return {values, bucket.rows};
}

void BucketMemory::publish(int64_t bucket_index, const Rows& rows,
                           c10::function_ref<at::Tensor(int64_t)> tensor_of) {
  const Bucket& bucket = plan_.buckets[bucket_index];
  if (plan_.layout_of(bucket).in_place()) return;
  std::vector<at::Tensor> tensors;
  for (const Slot& slot : bucket.slots) tensors.push_back(tensor_of(slot.parameter));
  copy_out_of_bucket(plan_, bucket, rows.values(), tensors);
  pool_.release(rows.values());
}

at::Tensor BucketMemory::place(int64_t parameter, at::IntArrayRef sizes,
                               at::IntArrayRef strides) const {
  const int64_t arena = plan_.parameter_arena[parameter];
  if (!plan_.arenas[arena].layout->in_place()) return {};
  return flat_[arena].as_strided(sizes, strides, plan_.parameter_offset[parameter]);
}

int64_t BucketMemory::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& flat : flat_) {
    if (flat.defined()) bytes += static_cast<int64_t>(flat.nbytes());
  }
  return bytes;
}

void convert(const at::Tensor& from, const at::Tensor& to) {
  kernels::cast_copy(from.const_data_ptr(), from.scalar_type(), to.mutable_data_ptr(),
                     to.scalar_type(), from.numel(), /*addend=*/nullptr,
                     current_stream(from.device()));
}

void copy_into_bucket(const Plan& plan, const Bucket& bucket, const Slot& slot,
                      const at::Tensor& tensor, const at::Tensor& rows, const at::Tensor& added) {
  const auto stream = current_stream(rows.device());
  c10::SmallVector<kernels::CopySpan, 8> copies;
  for (const Span& span : plan.spans(bucket, slot)) {
    char* const to = mutable_address(rows, span.bucket_begin);
    if (tensor.defined()) {
      copies.push_back({address(tensor, span.parameter_begin), to, span.numel,
                        added.defined() ? address(added, span.parameter_begin) : nullptr});
    } else {
      kernels::fill_zero(to, span.numel * rows.element_size(), stream);
    }
  }
  if (copies.empty()) return;
  // One call copies all spans: on a GPU that is one launch, and not one for every rank.
  kernels::cast_copy_spans(copies, tensor.scalar_type(), rows.scalar_type(), added.defined(),
                           stream);
}

void copy_out_of_bucket(const Plan& plan, const Bucket& bucket, const at::Tensor& rows,
                        c10::ArrayRef<at::Tensor> tensors) {
  TORCH_INTERNAL_ASSERT(tensors.size() == bucket.slots.size(), "a tensor for every slot");
  std::vector<kernels::CopySpan> copies;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    TORCH_INTERNAL_ASSERT(tensors[i].scalar_type() == rows.scalar_type());
    for (const Span& span : plan.spans(bucket, bucket.slots[i])) {
      copies.push_back({address(rows, span.bucket_begin),
                        mutable_address(tensors[i], span.parameter_begin), span.numel});
    }
  }
  kernels::cast_copy_spans(copies, rows.scalar_type(), rows.scalar_type(), /*with_addends=*/false,
                           current_stream(rows.device()));
}

}  // namespace zero
