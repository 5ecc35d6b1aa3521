// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The state of an unsharded torch optimizer over the same parameters, from memory or from a file,
// cut into this rank's segments. Internal.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>

#include "zero/training/engine.h"

namespace zero {

// Collective. See ZeroOptimizer::load_plain_state().
void load_plain_state(Engine& engine, const torch::optim::Optimizer& plain);
void load_plain_state(Engine& engine, const std::string& path, const Engine::ParamGroups& groups);

}  // namespace zero
