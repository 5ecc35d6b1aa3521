// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/clipping.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones.h>

#include <utility>

#include "zero/memory/trace_range.h"

namespace zero {

Clipping::Clipping(const std::vector<SegmentTensors>& segments, const std::vector<double>& weights,
                   at::Device device, Communicator& comm, bool exact)
    : segments_(segments),
      weights_(weights),
      device_(device),
      comm_(comm),
      exact_(exact),
      coefficient_(at::ones({}, at::TensorOptions().dtype(at::kDouble).device(device))) {}

at::Tensor Clipping::measure(double norm_type, int64_t rounds, const at::Tensor& bound) {
  const TraceRange range("norm");
  const ShardNorm made = exact_ ? exact_shard_norm(segments_, norm_type, device_, comm_, bound)
                                : shard_norm(segments_, weights_, norm_type, device_, comm_, bound);
  if (!bound.defined()) nonfinite_ = Nonfinite{rounds, made.nonfinite};
  return made.norm;
}

const at::Tensor& Clipping::norm_of_rounds(double norm_type, int64_t rounds) {
  const bool known = norm_ && norm_->norm_type == norm_type && norm_->rounds == rounds &&
                     norm_->bound_changes == bound_changes_;
  if (!known) norm_ = Known{norm_type, rounds, bound_changes_, measure(norm_type, rounds, bound())};
  return norm_->norm;
}

at::Tensor Clipping::norm(double norm_type, int64_t rounds) {
  return norm_of_rounds(norm_type, rounds) * coefficient_;
}

void Clipping::scale_coefficient(double max_norm, const at::Tensor& norm) {
  // A NaN stays a NaN. Never read here: the device knows it when the update runs.
  coefficient_.mul_((max_norm / (norm + 1e-6)).clamp_max_(1.0));
}

at::Tensor Clipping::bound() const {
  return bound_.defined() ? bound_.to(at::kFloat) : at::Tensor();
}

void Clipping::lower_bound_to(double value) {
  const at::Tensor bound = value / coefficient_;
  bound_ = bound_.defined() ? at::minimum(bound_, bound) : bound;
  ++bound_changes_;
}

void Clipping::clip(double max_norm, double norm_type, const at::Tensor& norm, int64_t rounds) {
  clips_.push_back({max_norm, norm_type});
  clipped_rounds_ = rounds;
  scale_coefficient(max_norm, norm);
}

void Clipping::clip_value(double value, int64_t rounds) {
  clips_.push_back({value, std::nullopt});
  clipped_rounds_ = rounds;
  lower_bound_to(value);
}

void Clipping::replay_clips(int64_t rounds) {
  if (clips_.empty() || std::exchange(clipped_rounds_, rounds) == rounds) return;
  coefficient_.fill_(1.0);
  bound_.reset();
  for (const Clip& c : clips_) {
    if (c.norm_type) {
      scale_coefficient(c.limit, norm(*c.norm_type, rounds));
    } else {
      lower_bound_to(c.limit);
    }
  }
}

at::Tensor Clipping::unclipped_norm(int64_t rounds) {
  const bool known =
      norm_ && norm_->norm_type == 2.0 && norm_->rounds == rounds && norm_->bound_changes == 0;
  return known ? norm_->norm : measure(2.0, rounds);
}

at::Tensor Clipping::nonfinite(int64_t rounds) {
  if (!nonfinite_ || nonfinite_->rounds != rounds) measure(2.0, rounds);
  if (clips_.empty()) return nonfinite_->count;
  // The norm of finite values overflows where their powers do. Clipped by it, all would be zero.
  return (coefficient_ > 0).logical_not().logical_or(nonfinite_->count != 0).to(at::kDouble);
}

void Clipping::reset() {
  norm_.reset();
  nonfinite_.reset();
  if (!clips_.empty()) coefficient_.fill_(1.0);
  bound_.reset();
  bound_changes_ = 0;
  clips_.clear();
}

}  // namespace zero
