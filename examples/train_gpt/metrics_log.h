// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A training run as JSON lines: what was run, then one object a step, for plots and comparisons.
// examples/train_gpt/plot_metrics.py draws them.
//
//   {"run":{"world_size":2,"first_step":0,"dtype":"float32",...}}
//   {"step":1,"loss":5.55,"gradient_norm":1.9,...,"validation_loss":5.55}
//
// TensorBoard's event files would need its protocol buffers; Debian has no C++
// library that writes them.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include "examples/train_gpt/step_metrics.h"
#include "examples/train_gpt/train_options.h"

namespace zero::examples {

class MetricsLog {
 public:
  // Replaces `path`, or adds to its whole lines. Throws c10::Error when it cannot be opened.
  explicit MetricsLog(const std::string& path, bool append = false);

  // The first line.
  void write_run(const TrainOptions& options, int world_size, int64_t first_step);

  // Each line is on its way to the file when this returns, so that a run that
  // is killed leaves whole lines.
  void write(const StepMetrics& metrics);

 private:
  // A line that cannot be written is said once: a full disk must not end the training.
  void put(const std::string& line);

  std::string path_;
  std::ofstream file_;
  bool failed_ = false;
};

}  // namespace zero::examples
