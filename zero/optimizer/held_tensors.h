// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Describes the tensors that ranks hold, for the checkpoints of meshes whose ranks hold different
// ones.
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "zero/agreement/shard_domains.h"
#include "zero/checkpoint/match/mesh_tensors.h"
#include "zero/memory/parameter_table.h"
#include "zero/options.h"
#include "zero/training/engine.h"

namespace zero {

// The rank of the mesh that names the set of ranks which share `group`.
int64_t holder_of(const Group& group, const Group& mesh);

// The part that this rank holds of the tensor of this name and shape.
struct OwnPart {
  int64_t part = 0;
  int64_t parts = 1;
  int64_t dimension = 0;
  std::vector<int64_t> sections = {};
};
// Throws c10::Error for a dimension that the tensor does not have.
OwnPart own_part(const ZeroOptions& options, const std::string& name, c10::IntArrayRef shape);
// The numbers of this rank's parts, by name.
std::map<std::string, int64_t> own_parts(const ParameterTable& table, const ZeroOptions& options);

// The managed parameters as a manifest has them, each whole, with the formats of moments and
// masters that the options ask for.
std::vector<ManifestParameter> managed_parameters(const ParameterTable& table,
                                                  const ZeroOptions& options);

// This rank's share of what its sets of ranks describe: of n ranks that share a parameter group,
// rank r describes every n-th parameter. `groups` have the present options. `hashes`: those of
// frozen parameters too.
HeldTensors describe_held(const ParameterTable& table, const ShardDomains& domains,
                          const ZeroOptions& options,
                          const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          bool hashes);

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
