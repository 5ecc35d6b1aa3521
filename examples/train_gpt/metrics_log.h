// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A training run as JSON lines: one object a step, for plots and comparisons.
// examples/train_gpt/plot_metrics.py draws them.
//
//   {"step":1,"loss":5.55,"gradient_norm":1.9,...,"validation_loss":5.55}
//
// TensorBoard's event files would need its protocol buffers; Debian has no C++
// library that writes them.
#pragma once

#include <fstream>
#include <string>

#include "examples/train_gpt/step_metrics.h"

namespace zero::examples {

class MetricsLog {
 public:
  // Replaces `path`. Throws c10::Error when it cannot be written.
  explicit MetricsLog(const std::string& path);

  // Each line is on its way to the file when this returns, so that a run that
  // is killed leaves whole lines.
  void write(const StepMetrics& metrics);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace zero::examples
