// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/mesh.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace zero {

struct Mesh::State {
  size_t index(const std::string& name) const {
    std::string known;
    for (size_t d = 0; d < dimensions.size(); ++d) {
      if (dimensions[d].name == name) return d;
      known += (d == 0 ? "" : ", ") + dimensions[d].name;
    }
    TORCH_CHECK(false, "mesh of group \"", all.name(), "\": expected one of its dimensions ", known,
                ", got \"", name, "\" on rank ", all.rank());
  }

  Group all;
  std::vector<Dimension> dimensions;
  std::vector<int> strides;
  std::vector<int> coordinates;
  mutable std::mutex mutex;
  mutable std::map<std::vector<bool>, Group> groups;  // by which dimensions vary
};

Mesh::Mesh(Group group, std::vector<Dimension> dimensions) {
  const auto fail = [&](const auto&... text) {
    TORCH_CHECK(false, "mesh of group \"", group.name(), "\" (this is rank ", group.rank(),
                "): ", text...);
  };
  std::set<std::string> names;
  int64_t ranks = 1;
  for (const Dimension& d : dimensions) {
    if (d.name.empty() || d.name.find_first_of("+/") != std::string::npos) {
      fail("expected a name without '+' and '/' for every dimension, got \"", d.name, "\"");
    }
    if (!names.insert(d.name).second) {
      fail("expected different names, got \"", d.name, "\" twice");
    }
    if (d.size < 1) fail("expected sizes of at least 1, got ", d.size, " for ", d.name);
    ranks *= d.size;
  }
  if (ranks != group.world_size()) {
    fail("expected sizes whose product is ", group.world_size(), ", the number of ranks, got ",
         ranks, "; every rank has one place in the mesh");
  }
  std::vector<int> strides(dimensions.size()), coordinates(dimensions.size());
  int stride = 1;
  for (size_t d = dimensions.size(); d-- > 0;) {
    strides[d] = stride;
    coordinates[d] = group.rank() / stride % dimensions[d].size;
    stride *= dimensions[d].size;
  }
  state_ = std::shared_ptr<const State>(new State{
      std::move(group), std::move(dimensions), std::move(strides), std::move(coordinates), {}, {}});
}

const Group& Mesh::all() const { return state_->all; }
const std::vector<Mesh::Dimension>& Mesh::dimensions() const { return state_->dimensions; }

int Mesh::size(const std::string& dimension) const {
  return state_->dimensions[state_->index(dimension)].size;
}

int Mesh::coordinate(const std::string& dimension) const {
  return state_->coordinates[state_->index(dimension)];
}

Group Mesh::group(const std::vector<std::string>& dimensions) const {
  const State& mesh = *state_;
  std::vector<bool> named(mesh.dimensions.size()), varies(mesh.dimensions.size());
  for (const std::string& name : dimensions) {
    const size_t d = mesh.index(name);
    TORCH_CHECK(!named[d], "mesh of group \"", mesh.all.name(),
                "\": expected different dimensions, got \"", name, "\" twice on rank ",
                mesh.all.rank());
    named[d] = true;
    varies[d] = mesh.dimensions[d].size > 1;
  }
  // Ranks in mesh order: every varying dimension multiplies what those before it gave.
  std::vector<int> ranks{mesh.all.rank()};
  std::string name;
  for (size_t d = 0; d < varies.size(); ++d) {
    if (!varies[d]) continue;
    std::vector<int> more;
    for (const int rank : ranks) {
      for (int c = 0; c < mesh.dimensions[d].size; ++c) {
        more.push_back(rank + (c - mesh.coordinates[d]) * mesh.strides[d]);
      }
    }
    ranks = std::move(more);
    name += (name.empty() ? "" : "+") + mesh.dimensions[d].name;
  }
  if (static_cast<int>(ranks.size()) == mesh.all.world_size()) return mesh.all;
  const std::lock_guard<std::mutex> lock(mesh.mutex);
  const auto found = mesh.groups.find(varies);
  if (found != mesh.groups.end()) return found->second;
  const Group group = mesh.all.subgroup(ranks, name.empty() ? "alone" : name);
  return mesh.groups.emplace(varies, group).first->second;
}

}  // namespace zero
