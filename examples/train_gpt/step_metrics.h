// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What is known about one training step once it is over.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/memory.h"

namespace zero::examples {

// Hexadecimal digits that are equal where the bits of the masters are.
struct MastersHash {
  std::string all;                                              // 32 digits
  std::vector<std::pair<std::string, std::string>> parameters;  // name, 16 digits
};

struct StepMetrics {
  int64_t step = 0;                       // counted from 1: steps done so far
  double loss = 0.0;                      // nats per byte, mean over the global batch
  std::optional<double> validation_loss;  // the same over the held-out text, where measured
  std::optional<double> ema_loss;         // that of the averaged parameters, with --ema
  double gradient_norm = 0.0;             // before clipping; NaN with --update-in-backward
  double learning_rate = 0.0;
  double loss_scale = 1.0;             // what this step's loss was multiplied by
  bool skipped = false;                // gradients were not finite: nothing was updated
  int64_t tokens = 0;                  // in this step, over all ranks
  double seconds = 0.0;                // of this step, validation excluded
  std::optional<MastersHash> masters;  // where measured, with --same-bits
  MemoryReport memory;                 // bytes of this rank at the end of the last backward pass
};

}  // namespace zero::examples
