// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state of an unsharded torch optimizer over the same parameters, cut into this rank's
// segments. Internal.
#pragma once

#include <torch/optim/optimizer.h>

#include "zero/training/engine.h"

namespace zero {

// Collective. See ZeroOptimizer::load_plain_state().
void load_plain_state(Engine& engine, const torch::optim::Optimizer& plain);

}  // namespace zero
