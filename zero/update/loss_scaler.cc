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
      scale_(options.initial_scale()),
      hysteresis_left_(options.hysteresis()) {
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
    skipped_at_min_ = 0;
    if (++good_steps_ >= options_.growth_interval()) {
      scale_ = std::min(scale_ * options_.growth_factor(), options_.max_scale());
      good_steps_ = 0;
      hysteresis_left_ = options_.hysteresis();
    }
    return;
  }
  good_steps_ = 0;
  if (scale_ <= options_.min_scale()) {
    ++skipped_at_min_;
    TORCH_CHECK(max_skipped_ == 0 || skipped_at_min_ <= max_skipped_, "rank ", rank_,
                ": loss scaler: ", skipped_at_min_,
                " steps in a row were skipped for non-finite gradients at the minimum scale ",
                options_.min_scale(), "; expected at most ", max_skipped_,
                ", ZeroOptions::max_skipped_in_a_row. The model has diverged or its inputs "
                "are not finite: load an earlier checkpoint, lower the learning rate, or train "
                "these layers in bfloat16 or float32");
    return;
  }
  if (--hysteresis_left_ > 0) return;
  hysteresis_left_ = 1;  // once used up, every further bad step shrinks the scale
  scale_ = std::max(scale_ * options_.backoff_factor(), options_.min_scale());
}

void LossScaler::set_state(const State& state) {
  TORCH_CHECK(std::isfinite(state.scale) && state.scale > 0,
              "loss scaler: expected a positive, finite scale, got ", state.scale);
  if (!dynamic_) return;
  scale_ = std::clamp(state.scale, options_.min_scale(), options_.max_scale());
  good_steps_ = state.good_steps;
  hysteresis_left_ = state.hysteresis_left;
  skipped_at_min_ = state.skipped_at_min;
}

}  // namespace zero
