// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/skip_watch.h"

#include <c10/util/Exception.h>

#include <utility>

namespace zero {

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
        "ZeroOptimizer::step_skipped() and stats(). This is said once.");
  }
  if (at_most_ == 0 || in_a_row_ <= at_most_) return;
  const int64_t row = std::exchange(in_a_row_, 0);
  TORCH_CHECK(false, "rank ", rank_, ": ", row,
              " steps in a row were skipped for non-finite gradients: expected at most ", at_most_,
              ", ZeroOptions::max_skipped_in_a_row. The model has diverged or its inputs are not "
              "finite: load an earlier checkpoint, lower the learning rate, or look for the layer "
              "whose gradient is NaN");
}

}  // namespace zero
