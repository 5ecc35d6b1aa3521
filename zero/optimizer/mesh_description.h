// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Describes the tensors that ranks hold, for the checkpoints of meshes whose ranks hold different
// ones.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/checkpoint/match/mesh_tensors.h"
#include "zero/memory/parameter_table.h"
#include "zero/options.h"
#include "zero/training/engine.h"

namespace zero {

// The rank of the mesh that names the set of ranks which share `group`.
int64_t first_rank_of(const Group& group, const Group& mesh);

// The managed parameters as a manifest has them, each whole, with the formats of moments and
// masters that the options ask for.
std::vector<ManifestParameter> managed_parameters(const ParameterTable& table,
                                                  const ZeroOptions& options);

// The frozen parameters and buffers, for comparing ranks.
std::string whole_text(const ParameterTable& table);
// Those that ranks must have alike: in a save or a load of ranks that merge_tensors() asks, where
// ranks of one set describe them together, and where a call `protects` its state, for recover().
std::vector<std::string> whole_arguments(const Engine& engine, bool protects = false);

// Collective, where ranks hold different parameters. Returns what all of them hold, and null where
// every rank holds the same. `what` is for errors. Throws where frozen parameters of one name have
// different values, if `values` are to be saved: a load sets them.
std::unique_ptr<MeshTensors> merge_tensors(Engine& engine, const std::string& what,
                                           const Engine::ParamGroups& groups, bool values = false);

}  // namespace zero
