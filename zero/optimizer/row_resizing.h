// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The same optimizer after rows of its parameters went and others came. The engine is made anew
// over the communicators that are there, and masters and state move between the shards of both.
// Internal.
#pragma once

#include <memory>
#include <vector>

#include "zero/optimizer/checkpoints.h"
#include "zero/optimizer/recovery.h"
#include "zero/training/engine.h"
#include "zero/zero_optimizer.h"

namespace zero {

// Collective. Does what ZeroOptimizer::resize_rows() does to the optimizer whose present engine is
// `engine`.
void resize_rows(std::shared_ptr<Engine>& engine, Recovery& recovery,
                 const Checkpoints& checkpoints, const std::vector<ResizedRows>& changes,
                 Engine::ParamGroups& groups);

}  // namespace zero
