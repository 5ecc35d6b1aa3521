// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The record of steps: how many were made and skipped, and the loss scale that follows them.
//
// With deferred updates only the device knows whether a step was skipped. The host then learns it
// later, from copies that it does not wait for in step().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <variant>

#include "zero/gradients/gradient_reducer.h"
#include "zero/options.h"
#include "zero/update/loss_scaler.h"
#include "zero/update/step_counts.h"

namespace zero {

// Counts steps in a row that are skipped for non-finite gradients under a constant loss scale, so
// that training that makes no progress warns and then throws.
class SkipWatch {
 public:
  // `at_most` skipped steps in a row are accepted; 0: any number.
  SkipWatch(int64_t at_most, int rank) : at_most_(at_most), rank_(rank) {}

  // Goes on from the counts of a checkpoint, of which nothing is said.
  void resume_from(int64_t steps, int64_t skipped_steps) {
    steps_ = steps;
    skipped_steps_ = skipped_steps;
    in_a_row_ = 0;
  }

  // Takes the counts of steps so far; not every step need be seen. Warns once, on rank 0, at the
  // first skipped step, and throws c10::Error when more than `at_most` in a row were skipped; the
  // row then starts again.
  void record(int64_t steps, int64_t skipped_steps);

 private:
  const int64_t at_most_;
  const int rank_;
  bool warned_ = false;
  int64_t steps_ = 0;
  int64_t skipped_steps_ = 0;
  int64_t in_a_row_ = 0;
};

class StepRecord {
 public:
  // `any_half`: any rank has fp16 parameters. `deferred`: updates learn on `device` whether they
  // are skipped. `reducer` gets the scale of gradients and must outlive this.
  StepRecord(const ZeroOptions& options, bool any_half, bool deferred, at::Device device, int rank,
             GradientReducer& reducer);

  // A step whose update is not deferred: skipped for a non-finite gradient, left out by a rule, or
  // neither.
  void add(bool nonfinite, bool left_out = false) { counts_.add(nonfinite, left_out); }
  // A deferred one; both are 0-dim on the device, or undefined.
  void add(const at::Tensor& nonfinite, const at::Tensor& left_out = {}) {
    counts_.add(nonfinite, left_out);
  }
  // A step without gradients is not counted, but is the last one.
  void add_nothing() { counts_.add_nothing(); }
  // After the update of a step. Throws when too many steps in a row were skipped.
  void finish_step();

  // Lets the loss scale follow the last step. Waits until the device has done that step, though
  // not for what was enqueued since.
  void follow_loss_scale();
  const LossScaler& scaler() const { return scaler_; }
  // These wait for the device, if updates are deferred.
  StepCounts::Values counts() const { return counts_.read(); }
  // Updates of parameters, as a number or, if they are deferred, 0-dim double on the device.
  std::variant<int64_t, at::Tensor> steps() const { return counts_.steps(); }
  // step() calls with gradients.
  int64_t calls() const { return calls_; }

  // From a checkpoint. A constant scale stays what the options say.
  void restore(const StepCounts::Values& counts, const LossScaler::State& scale,
               bool dynamic_scale);

 private:
  void watch_skips();

  const bool skip_nonfinite_;
  const bool deferred_;
  const at::Device device_;
  GradientReducer& reducer_;
  LossScaler scaler_;
  StepCounts counts_;
  SkipWatch skip_watch_;
  bool followed_ = true;        // the loss scale knows the last step
  bool skips_fetched_ = false;  // with deferred updates: a copy of the counts is under way
  int64_t calls_ = 0;
};

}  // namespace zero
