// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The norm of the reduced gradient, and what step() clips it by: clips by a norm and by a value, in
// the order of the calls.
//
// All of them together are one bound and one coefficient: step() clamps each element to the bound
// and multiplies it by the coefficient. A clip by norm makes the coefficient smaller. A clip by
// value makes the bound at most value / coefficient, since clamp(c x, value) = c clamp(x, value /
// c).
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
  // `weights` as in shard_norm(), over the ranks of `comm`; `exact`: all weights are 1, and norms
  // are those of exact_shard_norm(). References must outlive this.
  Clipping(const std::vector<SegmentTensors>& segments, const std::vector<double>& weights,
           at::Device device, Communicator& comm, bool exact = false);

  // Collective. The norm of the gradient that `rounds` reduced, after the clips so far: 0-dim
  // double on the device. Sends nothing when the last norm is the same one.
  at::Tensor norm(double norm_type, int64_t rounds);
  // Multiplies the coefficient by min(1, max_norm / (norm + 1e-6)).
  void clip(double max_norm, double norm_type, const at::Tensor& norm, int64_t rounds);
  // Clamps to [-value, value] what the clips so far leave.
  void clip_value(double value, int64_t rounds);
  // Collective where gradients were added after the last clip: clips again from the beginning.
  void replay_clips(int64_t rounds);
  // Collective where it is not known. The 2-norm without clips, 0-dim double on the device.
  at::Tensor unclipped_norm(int64_t rounds);
  // Collective where no norm of these rounds is known. 0-dim double on the device: not 0 where any
  // gradient, or a norm that it was clipped by, is NaN or infinite.
  at::Tensor nonfinite(int64_t rounds);

  bool has_clips() const { return !clips_.empty(); }
  // 0-dim double beside the gradients; 1 without clips.
  const at::Tensor& coefficient() const { return coefficient_; }
  // What each element is clamped to before it is multiplied by the coefficient: 0-dim fp32 beside
  // the gradients; undefined without clips by value.
  at::Tensor bound() const;
  // The gradients are consumed.
  void reset();

 private:
  struct Clip {
    double limit;  // the norm, or each element
    std::optional<double> norm_type;
  };

  // The norm of gradients that are clamped and not multiplied: norm_, or measured.
  const at::Tensor& norm_of_rounds(double norm_type, int64_t rounds);
  // Measures anew. Without a bound it also counts what is not finite.
  at::Tensor measure(double norm_type, int64_t rounds, const at::Tensor& bound = {});
  void scale_coefficient(double max_norm, const at::Tensor& norm);
  void lower_bound_to(double value);

  const std::vector<SegmentTensors>& segments_;
  const std::vector<double>& weights_;
  const at::Device device_;
  Communicator& comm_;
  const bool exact_;

  std::vector<Clip> clips_;
  int64_t clipped_rounds_ = 0;  // of the gradient that they saw
  const at::Tensor coefficient_;
  at::Tensor bound_;  // 0-dim double beside the gradients; undefined without clips by value
  int64_t bound_changes_ = 0;  // since the gradients are new

  struct Known {
    double norm_type;
    int64_t rounds;
    int64_t bound_changes;
    at::Tensor norm;
  };
  std::optional<Known> norm_;
  // Of gradients that are not clamped, which hides infinities.
  struct Nonfinite {
    int64_t rounds;
    at::Tensor count;
  };
  std::optional<Nonfinite> nonfinite_;
};

}  // namespace zero
