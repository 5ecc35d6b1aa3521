// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Brings the parts of a protected step to the ranks that need them.
#pragma once

#include <functional>
#include <memory>

#include "zero/checkpoint/reader.h"
#include "zero/communicator.h"
#include "zero/recovery/generations.h"

namespace zero {

// Collective over `control`, whose ranks are those that gave their holdings. Returns a reader of
// the generation that `which` names, with the tensors for which needed(tensor) is true on this
// rank. The servers send their files to all ranks, 4 MiB at a time, so that each rank needs memory
// for its own tensors only.
std::unique_ptr<CheckpointReader> gather_generation(
    Communicator& control, const Generations& generations, const Restorable& which,
    const std::function<bool(const ManifestTensor&)>& needed);

}  // namespace zero
