// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A learning rate that warms up in a straight line and then falls along half a
// cosine. libtorch has neither for C++.
//
//   CosineSchedule schedule(optimizer, {.warmup_steps = 20, .total_steps = 400});
//   for (int64_t step = 0; step < 400; ++step) {
//     schedule.set_step(step);
//     ...
//     optimizer.step();
//   }
//
// The factor depends on the step alone, so a resumed run continues exactly
// where it stopped without saving the schedule.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace zero::examples {

struct CosineScheduleOptions {
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double final_factor = 0.1;  // of the peak, reached in the last step
};

class CosineSchedule {
 public:
  // The learning rates that `optimizer`'s groups have now are the peaks.
  // `optimizer` must outlive the schedule.
  CosineSchedule(torch::optim::Optimizer& optimizer, const CosineScheduleOptions& options);

  // Sets the learning rate of every group for step `step`, counted from 0.
  void set_step(int64_t step);

  // What set_step() multiplies the peaks by.
  double factor(int64_t step) const;

 private:
  torch::optim::Optimizer& optimizer_;
  CosineScheduleOptions options_;
  std::vector<double> peaks_;  // by group
};

}  // namespace zero::examples
