// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/step_counts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace zero {

SegmentCounts::SegmentCounts(int64_t segments, at::Device device)
    : counts_(at::zeros({segments}, at::TensorOptions().dtype(at::kFloat).device(device))),
      increment_(at::zeros_like(counts_)),
      updated_(static_cast<size_t>(segments), 0) {}

void SegmentCounts::add(const std::vector<uint8_t>& updated, const at::Tensor& nonfinite) {
  if (updated != updated_) {
    updated_ = updated;
    at::Tensor host =
        at::empty({increment_.numel()},
                  increment_.options().device(at::kCPU).pinned_memory(!increment_.is_cpu()));
    std::copy(updated.begin(), updated.end(), host.mutable_data_ptr<float>());
    increment_.copy_(host, /*non_blocking=*/true);
  }
  counts_.add_(nonfinite.defined() ? increment_ * nonfinite.eq(0) : increment_);
}

std::vector<int64_t> SegmentCounts::read() const {
  const at::Tensor host = counts_.to(at::kCPU);
  const auto* begin = host.const_data_ptr<float>();
  return {begin, begin + host.numel()};
}

void SegmentCounts::write(const std::vector<int64_t>& counts) {
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(counts.size()) == counts_.numel());
  at::Tensor host = at::empty({counts_.numel()}, counts_.options().device(at::kCPU));
  std::copy(counts.begin(), counts.end(), host.mutable_data_ptr<float>());
  counts_.copy_(host);
}

namespace {

StepCounts::Values values_of(const at::Tensor& host) {
  const auto* v = host.const_data_ptr<double>();
  return {static_cast<int64_t>(v[0]), static_cast<int64_t>(v[1]), v[2] != 0, v[3] != 0,
          static_cast<int64_t>(v[4])};
}

}  // namespace

StepCounts::StepCounts(std::optional<at::Device> device) {
  if (device) on_device_ = at::zeros({5}, at::TensorOptions().dtype(at::kDouble).device(*device));
}

void StepCounts::add(bool nonfinite, bool left_out) {
  TORCH_INTERNAL_ASSERT(!on_device_.defined());
  values_.skipped = nonfinite || left_out;
  values_.nonfinite = nonfinite;
  ++(values_.skipped ? values_.skipped_steps : values_.steps);
  if (left_out) ++values_.left_out_steps;
}

void StepCounts::add(const at::Tensor& nonfinite, const at::Tensor& left_out) {
  TORCH_INTERNAL_ASSERT(on_device_.defined());
  const at::Tensor steps = on_device_.select(0, 0);
  const at::Tensor last = on_device_.narrow(0, 2, 2);  // skipped, nonfinite
  // Each call is a launch on a GPU: none for a flag that is not there.
  if (!nonfinite.defined() && !left_out.defined()) {
    steps.add_(1);
    last.zero_();
    return;
  }
  const auto flag = [](const at::Tensor& tensor) { return tensor.ne(0).to(at::kDouble); };
  at::Tensor skipped;
  if (nonfinite.defined()) {
    skipped = flag(nonfinite);
    last.copy_(skipped);
  } else {
    last.zero_();
  }
  if (left_out.defined()) {
    const at::Tensor left = skipped.defined() ? flag(left_out) * (1 - skipped) : flag(left_out);
    on_device_.select(0, 4).add_(left);
    skipped = skipped.defined() ? skipped + left : left;
    last.select(0, 0).copy_(skipped);
  }
  steps.add_(1).sub_(skipped);
  on_device_.select(0, 1).add_(skipped);
}

void StepCounts::add_nothing() {
  values_.skipped = values_.nonfinite = false;
  if (on_device_.defined()) on_device_.narrow(0, 2, 2).zero_();
}

StepCounts::Values StepCounts::read() const {
  return on_device_.defined() ? values_of(on_device_.to(at::kCPU)) : values_;
}

std::variant<int64_t, at::Tensor> StepCounts::steps() const {
  if (on_device_.defined()) return on_device_.select(0, 0);
  return values_.steps;
}

void StepCounts::fetch() {
  if (!on_device_.defined()) return;
  if (!on_host_.defined()) {
    on_host_ =
        at::empty({5}, on_device_.options().device(at::kCPU).pinned_memory(!on_device_.is_cpu()));
  }
  on_host_.copy_(on_device_, /*non_blocking=*/true);
  if (on_device_.is_cpu()) return;
  const at::Device device = on_device_.device();
  if (!fetched_) fetched_.emplace(device.type());
  fetched_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

StepCounts::Values StepCounts::fetched() {
  if (!on_device_.defined()) return values_;
  if (fetched_) fetched_->synchronize();
  return values_of(on_host_);
}

void StepCounts::write(const Values& values) {
  values_ = values;
  if (!on_device_.defined()) return;
  at::Tensor host = at::empty({5}, on_device_.options().device(at::kCPU));
  auto* v = host.mutable_data_ptr<double>();
  v[0] = static_cast<double>(values.steps);
  v[1] = static_cast<double>(values.skipped_steps);
  v[2] = values.skipped ? 1.0 : 0.0;
  v[3] = values.nonfinite ? 1.0 : 0.0;
  v[4] = static_cast<double>(values.left_out_steps);
  on_device_.copy_(host);
}

}  // namespace zero
