// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A named grid of ranks that makes the subgroups of combined kinds of parallelism.
//
//   zero::Mesh mesh(world, {{"pp", 2}, {"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 1}});
//   zero::Group tensor = mesh.group({"tp"});
//   zero::Group data = mesh.group({"dp_replicate", "dp_shard"});
//
// The last dimension varies fastest: with sizes 2 x 2 x 2, rank 5 has the coordinates (1, 0, 1).
// Two meshes may lie over one Group, for example one for dense parameters, {dp, tp}, and one for
// experts, {expert_data, ep}.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "zero/process_group.h"

namespace zero {

// A value: copies share their groups. Thread safety: every member.
class Mesh {
 public:
  // A dimension of the grid.
  struct Dimension {
    std::string name;
    int size = 1;
  };

  // Sends nothing. All ranks of `group` pass equal dimensions. Throws c10::Error for an empty or
  // repeated name, one with '+' or '/', a size below 1, and sizes whose product is not
  // group.world_size().
  Mesh(Group group, std::vector<Dimension> dimensions);

  // All ranks, as given.
  const Group& all() const;
  const std::vector<Dimension>& dimensions() const;
  // Throw c10::Error for an unknown name.
  int size(const std::string& dimension) const;
  int coordinate(const std::string& dimension) const;

  // Sends nothing. The ranks, this one among them, that differ from this one in the named
  // dimensions only; in mesh order, whatever the order of the names. The same names always give
  // the same Group, and so the same cached communicators; dimensions of size 1 are as if they were
  // not named, and all dimensions give all(). No name, or only sizes of 1: this rank alone. Throws
  // c10::Error for an unknown name or one given twice.
  Group group(const std::vector<std::string>& dimensions) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace zero
