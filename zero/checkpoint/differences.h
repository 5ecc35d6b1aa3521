// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Finds the differences between a checkpoint and the model and optimizer it is loaded into.
#pragma once

#include <torch/optim/optimizer.h>

#include <set>
#include <string>
#include <vector>

#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/match/mesh_tensors.h"
#include "zero/memory/parameter_table.h"

namespace zero {

struct CheckpointDifferences {
  std::vector<std::string> lines;        // for people, in the order of the model
  std::set<std::string> unusable;        // names in the model that the checkpoint cannot fill
  bool same_optimizer = true;            // by class
  bool same_groups = true;               // by number, and by the parameters of each
  std::vector<std::string> notes;        // for people too, and no differences
  std::vector<std::string> conversions;  // see LoadReport
  // Names of the model whose state stays as it is, because the checkpoint lacks a part of it.
  std::set<std::string> without_state;
  // Per parameter group of the model: the checkpoint's group that has its options, or -1.
  std::vector<int64_t> groups_from;
};

// A tensor of the model as a manifest has it. It is no part, and its moments and master are in
// fp32.
ManifestParameter described(const Parameter& p);
ManifestParameter described(const NamedTensor& item);
// The same of a tensor as this rank holds it: a part, perhaps, where `mesh` is not null.
template <typename Tensor>
ManifestParameter held_here(const Tensor& tensor, const MeshTensors* mesh) {
  return mesh != nullptr ? mesh->own(tensor.name) : described(tensor);
}

// Another dtype or parameter group is a difference, but no hindrance: masters are
// fp32 in every checkpoint. Another shape or memory order is one. `mesh` is what all ranks hold,
// and null where each holds the same as this one. If ranks of the mesh hold different parameters,
// or did when they saved, groups are compared by their options and not by their numbers.
CheckpointDifferences find_differences(const Manifest& manifest, const ParameterTable& table,
                                       const torch::optim::Optimizer& inner,
                                       const MeshTensors* mesh = nullptr);

// For the same class of optimizer: adds parameters with a part of the state that torch's
// class cannot do without, or with state of some of the tensor-parallel parts that make up what is
// held here, and options of which this class has none.
void find_missing_state(const Manifest& manifest, const ParameterTable& table,
                        const torch::optim::Optimizer& inner, const MeshTensors* mesh,
                        CheckpointDifferences& differences);
void find_unknown_options(const Manifest& manifest, const torch::optim::Optimizer& inner,
                          CheckpointDifferences& differences);

// Returns a line for each format in which the run that saved kept moments or masters of parameters
// that `here` has in another one. `here` is the model as find_differences() has compared it.
std::vector<std::string> find_conversions(const Manifest& manifest,
                                          const std::vector<ManifestParameter>& here,
                                          const CheckpointDifferences& differences);

// Throws c10::Error with the count and the first ten, if there are any.
void throw_differences(const CheckpointDifferences& differences, const std::string& folder);

}  // namespace zero
