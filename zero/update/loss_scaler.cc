// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/loss_scaler.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace zero {

LossScaler::LossScaler(const LossScalerOptions& options, int64_t max_skipped, int rank)
    : options_(options),
      max_skipped_(max_skipped),
      rank_(rank),
      dynamic_(true),
      state_{.scale = options.initial_scale(), .hysteresis_left = options.hysteresis()} {
  TORCH_CHECK(std::isfinite(options.min_scale()) && options.min_scale() > 0,
              "loss scaler: expected a positive, finite min_scale, got ", options.min_scale());
  TORCH_CHECK(std::isfinite(options.max_scale()), "loss scaler: expected a finite max_scale, got ",
              options.max_scale());
  TORCH_CHECK(options.min_scale() <= options.initial_scale() &&
                  options.initial_scale() <= options.max_scale(),
              "loss scaler: expected min_scale <= initial_scale <= max_scale, got ",
              options.min_scale(), ", ", options.initial_scale(), ", ", options.max_scale());
  TORCH_CHECK(std::isfinite(options.growth_factor()) && options.growth_factor() >= 1,
              "loss scaler: expected a growth_factor of at least 1, got ", options.growth_factor());
  TORCH_CHECK(options.backoff_factor() > 0 && options.backoff_factor() < 1,
              "loss scaler: expected a backoff_factor between 0 and 1, got ",
              options.backoff_factor());
  TORCH_CHECK(options.growth_interval() >= 1,
              "loss scaler: expected a growth_interval of at least 1, got ",
              options.growth_interval());
  TORCH_CHECK(options.hysteresis() >= 1, "loss scaler: expected a hysteresis of at least 1, got ",
              options.hysteresis());
}

void LossScaler::update(bool skipped) {
  if (!dynamic_) return;
  if (!skipped) {
    state_.skipped_at_min = 0;
    if (++state_.good_steps >= options_.growth_interval()) {
      state_.scale = std::min(state_.scale * options_.growth_factor(), options_.max_scale());
      state_.good_steps = 0;
      state_.hysteresis_left = options_.hysteresis();
    }
    return;
  }
  state_.good_steps = 0;
  if (state_.scale <= options_.min_scale()) {
    ++state_.skipped_at_min;
    TORCH_CHECK(max_skipped_ == 0 || state_.skipped_at_min <= max_skipped_, "rank ", rank_,
                ": loss scaler: ", state_.skipped_at_min,
                " steps in a row were skipped for non-finite gradients at the minimum scale ",
                options_.min_scale(), "; expected at most ", max_skipped_,
                ", ZeroOptions::max_skipped_in_a_row. The model has diverged or its inputs "
                "are not finite: load an earlier checkpoint, lower the learning rate, or train "
                "these layers in bfloat16 or float32");
    return;
  }
  if (--state_.hysteresis_left > 0) return;
  state_.hysteresis_left = 1;  // once used up, every further bad step shrinks the scale
  state_.scale = std::max(state_.scale * options_.backoff_factor(), options_.min_scale());
}

void LossScaler::set_state(const State& state) {
  TORCH_CHECK(std::isfinite(state.scale) && state.scale > 0,
              "loss scaler: expected a positive, finite scale, got ", state.scale);
  if (!dynamic_) return;
  state_ = state;
  state_.scale = std::clamp(state.scale, options_.min_scale(), options_.max_scale());
}

}  // namespace zero
