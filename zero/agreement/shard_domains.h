// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Turns the placements of parameter groups into domains: the groups of ranks that share shards, and
// those that hold copies of them. Sends nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "zero/options.h"
#include "zero/process_group.h"

namespace zero {

struct ShardDomain {
  Group group;                    // the ranks that share the shards
  std::optional<Group> replicas;  // of more than one rank: copies of this rank's shards
  int64_t averaged_over = 1;      // what sums of gradients are divided by
  bool one_level = false;         // it has rows of different lengths
};

struct ShardDomains {
  Group home;  // as given to the constructor; sends frozen parameters and buffers
  Group mesh;  // all ranks that agree on calls, problems, rounds, skipped steps and norms
  // Those with parameter groups and, where the home domain is none of them, that one behind them.
  std::vector<ShardDomain> list = {};
  // Of `list`: `home`, and its replicas only if they have copies of all that is trained over it.
  // Its ranks get what `home` sends, and agree on that.
  int64_t home_domain = 0;
  std::vector<int64_t> of_group = {};     // per parameter group: its domain
  std::vector<double> norm_weights = {};  // per parameter group, see zero/norm/shard_norm.h
  // True if all ranks of the mesh hold the same parameters: each domain and its replicas are the
  // whole mesh, and so are the ranks that get what home sends. Otherwise, with experts or stages,
  // parameters can be compared within a domain only.
  bool uniform = true;
  bool two_level = true;  // ZeroOptions::two_level

  bool has_parameter_groups(int64_t domain) const;
  // Returns whether the ranks of `group` exchange data in two levels.
  bool has_two_levels(const Group& group) const;
  // Per parameter group: what ranks of domain `domain`, or of the mesh for -1, must agree on. Other
  // domains' weights in the norm may be others there, as that of a first stage.
  std::vector<std::string> describe(int64_t domain) const;
};

// Throws c10::Error for a placement of a group that does not exist, groups that
// share more than this rank or are not part of the mesh, and numbers out of range.
ShardDomains make_domains(const Group& group, const ZeroOptions& options, int64_t parameter_groups);

}  // namespace zero
