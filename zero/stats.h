// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a ZeroOptimizer reports of itself.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/communicator.h"

namespace zero {

// Counted on this rank since construction, recover() or a change of parameters.
struct Stats {
  Traffic data;               // gradients, parameters and norms
  Traffic control;            // control messages
  int64_t steps = 0;          // step() calls that updated parameters, from the first one on
  int64_t skipped_steps = 0;  // step() calls skipped for non-finite gradients, too
  int64_t rounds = 0;         // reductions of all buckets
  Traffic copies;             // of ZeroOptions::protect()
};

// What ZeroOptimizer::recover() went back to, and with whom.
struct RecoveryReport {
  int64_t steps = 0;  // step() calls made at the protected step, skipped ones included
  // By new rank: the rank in the first group, or the number of a process that joined since.
  std::vector<int> members;
};

}  // namespace zero
