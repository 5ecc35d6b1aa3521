// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/metrics_log.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

namespace zero::examples {

MetricsLog::MetricsLog(const std::string& path) : path_(path), file_(path) {
  TORCH_CHECK(file_.good(), "cannot write --log ", path);
}

void MetricsLog::write(const StepMetrics& metrics) {
  // JSON has no NaN and no infinity: nlohmann writes null for them.
  nlohmann::ordered_json line = {
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"gradient_norm", metrics.gradient_norm},
      {"learning_rate", metrics.learning_rate},
      {"loss_scale", metrics.loss_scale},
      {"skipped", metrics.skipped},
      {"tokens", metrics.tokens},
      {"seconds", metrics.seconds},
  };
  if (metrics.validation_loss) line["validation_loss"] = *metrics.validation_loss;
  file_ << line.dump() << std::endl;
  TORCH_CHECK(file_.good(), "cannot write --log ", path_);
}

}  // namespace zero::examples
