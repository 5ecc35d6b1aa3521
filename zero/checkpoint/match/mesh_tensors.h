// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The tensors of a model whose ranks hold different ones: experts, pipeline stages, tensor-parallel
// parts. Ranks describe what they hold to each other, and every rank merges the descriptions into
// the same list, in which each name, or each part of a name, is once. Sends nothing.
//
// A set is all ranks that share a parameter group, with their replicas; its first rank names it.
// Several sets may hold one name, as a layer norm beside tensor-parallel matrices or an embedding
// on two stages: the set with the lowest first rank stores it. Whether these are copies follows
// from the placements, by which the norm counts every parameter once.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/format/manifest.h"

namespace zero {

class MeshTensors {
 public:
  // `held[r]` is from rank r. `own_part` is the number of this rank's part of each tensor that is
  // cut. Throws c10::Error, the same on every rank: names that are held with
  // different kinds, shapes or memory orders, names of which the placements say that they are
  // different parameters, frozen parameters of one name with different values, and parts that do
  // not make up a whole.
  explicit MeshTensors(const std::vector<HeldTensors>& held, int64_t own_part = 0);

  // All tensors, by their sets' first ranks and in each set's order.
  const std::vector<ManifestParameter>& parameters() const { return parameters_; }
  const std::vector<ManifestParameter>& frozen() const { return frozen_; }
  const std::vector<ManifestParameter>& buffers() const { return buffers_; }
  // The options of all groups; `group` of a parameter is the number here. Groups of different sets
  // with the same options are one.
  const OptionGroups& groups() const { return groups_; }
  // How many sets there are.
  int64_t sets() const { return sets_; }

  bool has(const std::string& name) const { return parts_.count(name) != 0; }
  // The tensor as this rank holds it: whole, or its part.
  const ManifestParameter& own(const std::string& name) const;
  // Returns whether the set with this first rank stores this rank's part of the tensor.
  bool stores(const std::string& name, int64_t first_rank) const {
    return has(name) && stored_by_.at(stored_name(own(name))) == first_rank;
  }

 private:
  using Held = std::vector<HeldTensor>;
  // What each set that holds a tensor, or a part of one, says of it; the lowest first rank first.
  using Copies = std::vector<const HeldTensor*>;

  void number_groups(const std::vector<HeldTensors>& held);
  void merge_by_name(const std::vector<HeldTensors>& held, Held HeldTensors::*list,
                     const char* kind, std::vector<ManifestParameter>& into);
  void add_parts(const std::vector<Copies>& parts, std::vector<ManifestParameter>& into);

  std::vector<ManifestParameter> parameters_;
  std::vector<ManifestParameter> frozen_;
  std::vector<ManifestParameter> buffers_;
  OptionGroups groups_;
  std::map<std::pair<int64_t, int64_t>, int64_t> group_numbers_;  // by first rank and its group
  std::map<std::string, int64_t> stored_by_;                      // first rank, by stored_name()
  std::map<std::string, std::vector<ManifestParameter>> parts_;   // by name
  const size_t own_part_;
  std::map<std::string, const char*> kinds_;  // by name
  int64_t sets_ = 0;
};

}  // namespace zero
