// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/master_rows.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "bookkeeping/layout.h"
#include "kernels/split_master.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

// fp32 [numel] without memory, as the fake tensors of torch are.
at::Tensor without_memory(int64_t numel, at::Device device) {
  const auto bytes = static_cast<size_t>(numel) * sizeof(float);
  auto memory = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                      at::DataPtr(nullptr, device),
                                                      /*allocator=*/nullptr, /*resizable=*/false);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  const at::Tensor result = at::empty({0}, options).set_(c10::Storage(memory), 0, {numel}, {1});
  memory->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "expected master(parameter) of the ZeroOptimizer, which joins the halves of "
      "split_masters(true), got an access to a master of inner()");
  return result;
}

}  // namespace

MasterRows::MasterRows(const Plan& plan, std::vector<int64_t> ranks, WorkingArena& arena,
                       bool split)
    : plan_(plan), ranks_(std::move(ranks)), arena_(arena) {
  for (int64_t b = 0; b < std::ssize(plan.buckets); ++b) {
    const Bucket& bucket = plan.buckets[b];
    const bool is_split =
        split && plan.layout_of(bucket).in_place() && plan.arena_of(bucket).dtype == at::kBFloat16;
    const int64_t numel = bucket.rows.numel(ranks_[plan.domain_of(b)]);
    const auto options = at::TensorOptions().device(arena.device());
    rows_.push_back(arena.is_master(b) ? own_row(b)
                    : is_split         ? without_memory(numel, arena.device())
                                       : at::empty({numel}, options.dtype(at::kFloat)));
    lower_.push_back(is_split ? at::empty({numel}, options.dtype(at::kShort)) : at::Tensor());
  }
}

at::Tensor MasterRows::own_row(int64_t bucket) const {
  return arena_.rows(bucket).row(ranks_[plan_.domain_of(bucket)]);
}

int16_t* MasterRows::lower(const Segment& segment) const {
  const at::Tensor& lower = lower_[segment.bucket];
  return lower.defined() ? lower.mutable_data_ptr<int16_t>() + segment.offset : nullptr;
}

at::Tensor MasterRows::joined(int64_t bucket, int64_t begin, int64_t numel) const {
  at::Tensor result = at::empty({numel}, lower_[bucket].options().dtype(at::kFloat));
  const auto* upper = own_row(bucket).const_data_ptr<c10::BFloat16>() + begin;
  kernels::join_halves(upper, lower_[bucket].const_data_ptr<int16_t>() + begin, numel,
                       result.mutable_data_ptr<float>(), current_stream(result.device()));
  return result;
}

at::Tensor MasterRows::values(int64_t bucket) const {
  return is_split(bucket) ? joined(bucket, 0, lower_[bucket].numel()) : rows_[bucket];
}

at::Tensor MasterRows::values(const SegmentTensors& segment) const {
  const Segment& s = segment.segment;
  if (!is_split(s.bucket)) return segment.master;
  return in_shape_of(joined(s.bucket, s.offset, s.numel), segment.master);
}

void MasterRows::set(const SegmentTensors& segment, const at::Tensor& elements) {
  const Segment& s = segment.segment;
  if (!is_split(s.bucket)) {
    segment.master.copy_(in_shape_of(elements, segment.master));
    return;
  }
  const at::Tensor master = elements.to(lower_[s.bucket].device()).contiguous();
  auto* upper = own_row(s.bucket).mutable_data_ptr<c10::BFloat16>() + s.offset;
  kernels::split_halves(master.const_data_ptr<float>(), s.numel, upper, lower(s),
                        current_stream(master.device()));
}

at::Tensor MasterRows::rounded(const SegmentTensors& segment, const at::Tensor& elements) const {
  const Segment& s = segment.segment;
  const c10::ScalarType dtype = plan_.arena_of(plan_.buckets[s.bucket]).dtype;
  if (!is_split(s.bucket)) return elements.to(dtype).to(at::kFloat);
  const at::Tensor master = elements.contiguous();
  const at::Tensor upper = at::empty({s.numel}, master.options().dtype(dtype));
  const at::Tensor lower = at::empty({s.numel}, master.options().dtype(at::kShort));
  kernels::split_halves(master.const_data_ptr<float>(), s.numel, upper.mutable_data_ptr(),
                        lower.mutable_data_ptr<int16_t>(), current_stream(master.device()));
  return upper.to(at::kFloat);
}

void MasterRows::read_working() {
  for (int64_t b = 0; b < std::ssize(rows_); ++b) {
    if (is_split(b)) {
      lower_[b].zero_();
    } else if (!arena_.is_master(b)) {
      arena_.read_row(b, ranks_[plan_.domain_of(b)], rows_[b]);
    }
  }
}

void MasterRows::write_working(int64_t bucket, const at::Tensor& own_row) const {
  if (!arena_.is_master(bucket) && !is_split(bucket)) convert(rows_[bucket], own_row);
}

void MasterRows::set_aside(int64_t bucket) {
  if (arena_.is_master(bucket) || is_split(bucket)) aside_[bucket] = own_row(bucket).clone();
}

void MasterRows::take_back() {
  for (const auto& [bucket, row] : aside_) own_row(bucket).copy_(row);
  aside_.clear();
}

int64_t MasterRows::bytes_aside() const {
  int64_t bytes = 0;
  for (const auto& [bucket, row] : aside_) bytes += static_cast<int64_t>(row.nbytes());
  return bytes;
}

int64_t MasterRows::bytes() const {
  int64_t bytes = 0;
  for (int64_t b = 0; b < std::ssize(rows_); ++b) {
    if (arena_.is_master(b)) continue;
    bytes += static_cast<int64_t>((is_split(b) ? lower_[b] : rows_[b]).nbytes());
  }
  return bytes;
}

void MasterRows::clear() {
  rows_.clear();
  lower_.clear();
  aside_.clear();
}

}  // namespace zero
