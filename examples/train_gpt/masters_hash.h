// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A hash of all fp32 masters: two runs with equal hashes have the same bits.
#pragma once

#include <torch/nn/module.h>

#include "examples/train_gpt/step_metrics.h"
#include "zero/zero_optimizer.h"

namespace zero::examples {

// Collective. Hashes the masters of `optimizer` in the order of module.named_parameters(), and each
// by itself; the hashes do not depend on the number of ranks. Holds one full parameter at a time.
MastersHash hash_masters(const torch::nn::Module& module, ZeroOptimizer& optimizer);

}  // namespace zero::examples
