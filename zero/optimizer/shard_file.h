// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// This rank's shard as a file of a checkpoint, and what is stored beside the files. Sends nothing.
#pragma once

#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/match/mesh_tensors.h"
#include "zero/checkpoint/writer.h"
#include "zero/training/engine.h"

namespace zero {

// Returns this rank's file, with views of the shard; of several ranks that hold copies of a shard,
// the first one's has it.
FileToSave shard_file(const Engine& engine);

// Returns the manifest without run, metadata and files. `groups` have the present options; `mesh`
// is what all ranks hold, and null where each holds the same.
Manifest make_manifest(const Engine& engine, const Engine::ParamGroups& groups,
                       const MeshTensors* mesh);

}  // namespace zero
