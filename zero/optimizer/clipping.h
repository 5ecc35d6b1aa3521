// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The norm of the reduced gradient, and the coefficient that step() multiplies gradients by.
//
// Every norm belongs to a number of rounds that all ranks have agreed on, so that either all ranks
// send for it or none does. Neither the norm nor the coefficient is read on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "zero/communicator.h"
#include "zero/memory/segment_tensors.h"
#include "zero/norm/shard_norm.h"

namespace zero {

class Clipping {
 public:
  // `weights` as in shard_norm(), over the ranks of `comm`. References must outlive this.
  Clipping(const std::vector<SegmentTensors>& segments, const std::vector<double>& weights,
           at::Device device, Communicator& comm);

  // Collective. The norm of the gradient that `rounds` reduced, after the clips so far: 0-dim
  // double on the device. Sends nothing when the last norm is the same one.
  at::Tensor norm(double norm_type, int64_t rounds);
  // Multiplies the coefficient by min(1, max_norm / (norm + 1e-6)).
  void clip(double max_norm, double norm_type, const at::Tensor& norm, int64_t rounds);
  // Collective where gradients were added after the last clip: computes the coefficient again.
  void renew(int64_t rounds);
  // Collective where no norm of these rounds is known. 0-dim double on the device: not 0 where any
  // gradient, or a norm that it was clipped by, is NaN or infinite.
  at::Tensor nonfinite(int64_t rounds);

  bool has_clips() const { return !clips_.empty(); }
  // 0-dim double beside the gradients; 1 without clips.
  const at::Tensor& coefficient() const { return coefficient_; }
  // The gradients are consumed.
  void reset();

 private:
  struct Clip {
    double max_norm;
    double norm_type;
  };

  bool is_known(int64_t rounds) const { return known_ && known_rounds_ == rounds; }
  void compute_norm(double norm_type, int64_t rounds);
  void shrink(double max_norm, const at::Tensor& norm);

  const std::vector<SegmentTensors>& segments_;
  const std::vector<double>& weights_;
  const at::Device device_;
  Communicator& comm_;

  std::vector<Clip> clips_;
  int64_t clipped_rounds_ = 0;  // of the gradient that they saw
  const at::Tensor coefficient_;
  std::optional<ShardNorm> known_;
  double known_type_ = 0.0;
  int64_t known_rounds_ = 0;
};

}  // namespace zero
