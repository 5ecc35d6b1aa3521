// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A placement says which ranks hold parts or copies of a parameter in a job that combines several
// kinds of parallelism. An exact norm and an exact mean need to know it, and a plain tensor does
// not say it. Both structs use the same terms: a parameter is sharded over the ranks that hold
// different parts of it, and replicated over those that hold copies.
//
//   parameter                          placement
//   tensor-parallel matrix             sharded_over({mesh.group({"tp"})})
//   layer norm beside it               replicated_over({mesh.group({"tp"})})
//   shard of either over data ranks    sharded_over({mesh.group({"dp_shard", "tp"})}), or dp_shard
//   expert                             sharded_over({mesh.group({"ep"})}).expert(true)
//   embedding shared by two stages     owner(true) on one of them, owner(false) on the other
//
// Pipeline stages hold different parameters; that is no part of a placement.
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "zero/process_group.h"

namespace zero {

// The placement of one tensor that this rank holds, for zero/grad_norm.h.
struct Placement {
  // Every rank of these groups holds a different part of the parameter. Best one group for all
  // dimensions together: several are reduced one after the other, with a message each.
  TORCH_ARG(std::vector<Group>, sharded_over);

  // Every rank of these groups holds the same values and the same gradient, which counts once.
  // Nothing is sent over them; they are checked not to overlap with sharded_over.
  TORCH_ARG(std::vector<Group>, replicated_over);

  // An expert's norm is added up apart from that of dense parameters.
  TORCH_ARG(bool, expert) = false;

  // False on all ranks but one pipeline stage's for a parameter that stages share: it is clipped
  // here and counted there.
  TORCH_ARG(bool, owner) = true;
};

// The placement of one parameter group inside ZeroOptimizer, for ZeroOptions::placement(). It
// concerns the shards that the optimizer makes.
struct GroupPlacement {
  // The ranks that share masters, moments and gradient shards, and over which gradients are
  // reduced: the expert-data group for experts. Default: the optimizer's group.
  TORCH_ARG(std::optional<Group>, sharded_over) = std::nullopt;

  // Ranks that hold copies of this rank's shards: gradient shards are averaged over it after the
  // reduction, and nothing else is sent over it. Default: no copies.
  TORCH_ARG(std::optional<Group>, replicated_over) = std::nullopt;

  // The sum of gradients is divided by this. 0: by the number of ranks of sharded_over times those
  // of replicated_over, the mean. An expert that sees the tokens of several data ranks, whose
  // losses are means of their own tokens, needs the number of all those ranks here.
  TORCH_ARG(int64_t, averaged_over) = 0;

  // For the norm: how many ranks of the mesh hold the same gradients besides those of
  // replicated_over, for example the size of the tensor-parallel group for a layer norm.
  TORCH_ARG(int64_t, copies) = 1;

  // False where another pipeline stage counts these parameters in the norm.
  TORCH_ARG(bool, owner) = true;
};

// How tensor parallelism cuts tensors, for ZeroOptions::tensor_parts(). Rank i of `group` holds
// part i; parts follow each other in the whole and may have different sizes.
struct TensorParts {
  Group group;  // the ranks that hold the parts
  // Returns the dimension along which the parameter or buffer of this name is cut; nothing for one
  // that all ranks of `group` hold whole. Equal on all ranks that hold the name. Called by saves
  // and loads.
  std::function<std::optional<int64_t>(const std::string& name)> dimension;
};

}  // namespace zero
