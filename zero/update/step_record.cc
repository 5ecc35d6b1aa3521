// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/step_record.h"

#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "zero/memory/device_stream.h"

namespace zero {
namespace {

LossScaler make_scaler(bool any_half, const ZeroOptions& options, int rank) {
  // A scale that never learns of an overflow would only grow.
  if (!options.loss_scaler() && (!options.skip_nonfinite() || !any_half)) return {};
  return LossScaler(options.loss_scaler().value_or(LossScalerOptions()),
                    options.max_skipped_in_a_row(), rank);
}

}  // namespace

void SkipWatch::record(int64_t steps, int64_t skipped_steps) {
  const int64_t updated = steps - std::exchange(steps_, steps);
  const int64_t skipped = skipped_steps - std::exchange(skipped_steps_, skipped_steps);
  if (updated != 0 || skipped < 0) in_a_row_ = 0;
  // Counts that cover both kinds do not say in which order they came.
  if (skipped > 0 && updated == 0) in_a_row_ += skipped;
  if (skipped > 0 && !std::exchange(warned_, true) && rank_ == 0) {
    TORCH_WARN(
        "step() was skipped on all ranks because a gradient is NaN or infinite. The loss "
        "scale does not change, so the same gradients are skipped again; see "
        "ZeroOptimizer::step_skipped() and stats(). Where the program computes with p.grad() "
        "after a pass, which is NaN, it reads ZeroOptimizer::gradient() in its place. This is said "
        "once.");
  }
  if (at_most_ == 0 || in_a_row_ <= at_most_) return;
  const int64_t row = std::exchange(in_a_row_, 0);
  TORCH_CHECK(false, "rank ", rank_, ": ", row,
              " steps in a row were skipped for non-finite gradients: expected at most ", at_most_,
              ", ZeroOptions::max_skipped_in_a_row. The model has diverged or its inputs are not "
              "finite: load an earlier checkpoint, lower the learning rate, or look for the layer "
              "whose gradient is NaN; or the program computes with p.grad() after a pass, which is "
              "NaN: see ZeroOptimizer::gradient()");
}

StepRecord::StepRecord(const ZeroOptions& options, bool any_half, bool deferred, at::Device device,
                       int rank, GradientReducer& reducer)
    : skip_nonfinite_(options.skip_nonfinite()),
      deferred_(deferred),
      device_(device),
      reducer_(reducer),
      scaler_(make_scaler(any_half, options, rank)),
      counts_(deferred ? std::optional<at::Device>(device) : std::nullopt),
      skip_watch_(options.max_skipped_in_a_row(), rank) {
  reducer_.set_scale(1.0 / scaler_.scale());
}

void StepRecord::finish_step() {
  followed_ = !scaler_.dynamic();
  if (!followed_) counts_.fetch();
  if (!deferred_) follow_loss_scale();
  ++calls_;
  watch_skips();
}

void StepRecord::follow_loss_scale() {
  // A capture cannot wait. If the scale is dynamic, step() refuses the capture.
  if (is_capturing(device_)) return;
  if (std::exchange(followed_, true)) return;
  const StepCounts::Values last = counts_.fetched();
  if (last.nonfinite || !last.skipped) scaler_.update(last.nonfinite);
  reducer_.set_scale(1.0 / scaler_.scale());
}

void StepRecord::watch_skips() {
  const auto record = [this](const StepCounts::Values& values) {
    const int64_t nonfinite = values.skipped_steps - values.left_out_steps;
    skip_watch_.record(values.steps + values.left_out_steps, nonfinite);
  };
  // A dynamic scale has a limit of its own.
  if (scaler_.dynamic() || !skip_nonfinite_) return;
  if (!deferred_) {
    record(counts_.read());
    return;
  }
  // A copy that started kSampled steps ago has long arrived, so nothing waits; and all ranks read
  // the counts of the same step.
  constexpr int64_t kSampled = 16;
  if (calls_ % kSampled != 0 || is_capturing(device_)) return;
  if (std::exchange(skips_fetched_, true)) record(counts_.fetched());
  counts_.fetch();
}

void StepRecord::restore(const StepCounts::Values& counts, const LossScaler::State& scale,
                         bool dynamic_scale) {
  if (dynamic_scale) scaler_.set_state(scale);
  reducer_.set_scale(1.0 / scaler_.scale());
  counts_.write(counts);
  calls_ = counts.steps + counts.skipped_steps;
  skip_watch_.resume_from(counts.steps + counts.left_out_steps,
                          counts.skipped_steps - counts.left_out_steps);
  skips_fetched_ = false;
}

}  // namespace zero
