// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How far a training run is: a bar that redraws itself on a terminal, plain
// lines when the output goes to a file or a pipe.
//
//   Progress progress(stdout, /*first_step=*/0, /*steps=*/400);
//   progress.show(metrics);  // after every step
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "examples/train_gpt/step_metrics.h"

namespace zero::examples {

class Progress {
 public:
  // Of a run from step `first_step` (0, or where it was resumed) to `steps`.
  Progress(std::FILE* out, int64_t first_step, int64_t steps);

  // Ends the line that is drawn, so that nothing is printed behind it.
  ~Progress();

  // A terminal shows the latest step, with a sparkline of the loss, and keeps the lines with a
  // validation loss. Elsewhere only those lines and the first and last ones are written. mpirun
  // gives its ranks a terminal that may be a file, so it counts as elsewhere.
  void show(const StepMetrics& metrics);
  int64_t skipped_steps() const { return skipped_; }

 private:
  using Clock = std::chrono::steady_clock;

  std::string line(const StepMetrics& metrics) const;
  std::string time_left(int64_t steps_done) const;

  std::FILE* out_;
  int64_t first_step_;
  int64_t steps_;
  bool terminal_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_drawn_{};
  double tokens_per_second_ = 0.0;  // smoothed, so that it can be read
  std::vector<double> losses_;
  int64_t skipped_ = 0;
  bool drawn_ = false;  // a line that has no end yet
};

}  // namespace zero::examples
