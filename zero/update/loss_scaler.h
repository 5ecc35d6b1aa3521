// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The factor that keeps small fp16 gradients above zero. A pure state machine:
// every rank feeds it the same decisions, so every rank holds the same scale.
//
// After a step with a non-finite gradient the scale shrinks (once `hysteresis`
// such steps were seen); after `growth_interval` good steps in a row it grows.
// Source of the rule: Micikevicius et al., "Mixed Precision Training", 2018.
#pragma once

#include <cstdint>

#include "zero/options.h"

namespace zero {

class LossScaler {
 public:
  // A constant 1 that never changes.
  LossScaler() = default;
  // `max_skipped` is ZeroOptions::max_skipped_in_a_row. Throws c10::Error for a scale that is not
  // positive and finite, a growth factor below 1, a backoff factor outside (0, 1), an interval or
  // hysteresis below 1, or min_scale > initial_scale or initial_scale > max_scale.
  explicit LossScaler(const LossScalerOptions& options, int64_t max_skipped = 0, int rank = 0);

  bool dynamic() const { return dynamic_; }
  double scale() const { return state_.scale; }

  // Takes the outcome of one step. Throws c10::Error when more than max_skipped steps in a row were
  // skipped at the minimum scale, unless it is 0.
  void update(bool skipped);

  // Everything that changes, for checkpoints.
  struct State {
    double scale = 1.0;
    int64_t good_steps = 0;       // in a row since the last change
    int64_t hysteresis_left = 1;  // bad steps until the scale shrinks
    int64_t skipped_at_min = 0;   // in a row
  };
  const State& state() const { return state_; }
  // Moves the scale in `state` between min_scale and max_scale, which need not be those that it was
  // saved with. Throws c10::Error when it is not positive and finite.
  void set_state(const State& state);

 private:
  LossScalerOptions options_;
  int64_t max_skipped_ = 0;
  int rank_ = 0;
  bool dynamic_ = false;
  State state_;
};

}  // namespace zero
