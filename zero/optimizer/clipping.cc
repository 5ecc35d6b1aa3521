// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/clipping.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>

#include <utility>

#include "zero/memory/trace_range.h"

namespace zero {

Clipping::Clipping(const std::vector<SegmentTensors>& segments, const std::vector<double>& weights,
                   at::Device device, Communicator& comm)
    : segments_(segments),
      weights_(weights),
      device_(device),
      comm_(comm),
      coefficient_(at::ones({}, at::TensorOptions().dtype(at::kDouble).device(device))) {}

void Clipping::compute_norm(double norm_type, int64_t rounds) {
  if (is_known(rounds) && known_type_ == norm_type) return;
  const TraceRange range("norm");
  known_ = shard_norm(segments_, weights_, norm_type, device_, comm_);
  known_type_ = norm_type;
  known_rounds_ = rounds;
}

at::Tensor Clipping::norm(double norm_type, int64_t rounds) {
  compute_norm(norm_type, rounds);
  return known_->norm * coefficient_;
}

void Clipping::shrink(double max_norm, const at::Tensor& norm) {
  // A NaN stays a NaN. Never read here: the device knows it when the update runs.
  coefficient_.mul_((max_norm / (norm + 1e-6)).clamp_max_(1.0));
}

void Clipping::clip(double max_norm, double norm_type, const at::Tensor& norm, int64_t rounds) {
  clips_.push_back({max_norm, norm_type});
  clipped_rounds_ = rounds;
  shrink(max_norm, norm);
}

void Clipping::renew(int64_t rounds) {
  if (clips_.empty() || std::exchange(clipped_rounds_, rounds) == rounds) return;
  coefficient_.fill_(1.0);
  for (const Clip& c : clips_) shrink(c.max_norm, norm(c.norm_type, rounds));
}

at::Tensor Clipping::nonfinite(int64_t rounds) {
  if (!is_known(rounds)) compute_norm(2.0, rounds);
  if (clips_.empty()) return known_->nonfinite;
  // The norm of finite values overflows where their powers do. Clipped by it, all would be zero.
  return (coefficient_ > 0).logical_not().logical_or(known_->nonfinite != 0).to(at::kDouble);
}

void Clipping::reset() {
  known_.reset();
  if (!clips_.empty()) coefficient_.fill_(1.0);
  clips_.clear();
}

}  // namespace zero
