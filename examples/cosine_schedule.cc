// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/cosine_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace zero::examples {

CosineSchedule::CosineSchedule(torch::optim::Optimizer& optimizer,
                               const CosineScheduleOptions& options)
    : optimizer_(optimizer), options_(options) {
  for (const auto& group : optimizer.param_groups()) {
    peaks_.push_back(group.options().get_lr());
  }
}

double CosineSchedule::factor(int64_t step) const {
  if (step < options_.warmup_steps) {
    // Not zero in the first step: every step should train.
    return static_cast<double>(step + 1) / static_cast<double>(options_.warmup_steps);
  }
  const int64_t falling_steps =
      std::max<int64_t>(options_.total_steps - 1 - options_.warmup_steps, 1);
  const double progress = std::min(
      static_cast<double>(step - options_.warmup_steps) / static_cast<double>(falling_steps), 1.0);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options_.final_factor + (1.0 - options_.final_factor) * cosine;
}

void CosineSchedule::set_step(int64_t step) {
  auto& groups = optimizer_.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].options().set_lr(peaks_[i] * factor(step));
  }
}

}  // namespace zero::examples
