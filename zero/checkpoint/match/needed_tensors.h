// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which stored tensors of a checkpoint a rank reads.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint/match/part_reader.h"

namespace zero {

class NeededTensors {
 public:
  // The pieces of all kinds that overlap `range`.
  void add(const HeldRange& range);
  // The state of an object that is included.
  void add_state(const std::string& owner, const std::string& kind);

  bool contains(const ManifestTensor& tensor) const;

 private:
  struct Ranges {
    std::map<int64_t, int64_t> by_begin;  // to where they end; they do not overlap
    // One value stands for all elements of a range, also between runs of a tensor-parallel part.
    std::vector<std::pair<int64_t, int64_t>> hulls;
  };
  std::map<std::string, Ranges> ranges_;  // by owner
  std::set<std::pair<std::string, std::string>> states_;
};

}  // namespace zero
