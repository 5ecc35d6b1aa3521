// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/process_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace zero {

Topology Topology::of_one_machine(int world_size) {
  return Topology(std::vector<int>(static_cast<size_t>(world_size), 0));
}

Topology Topology::of_equal_machines(int world_size, int ranks_per_machine) {
  TORCH_CHECK(ranks_per_machine > 0 && world_size > 0 && world_size % ranks_per_machine == 0,
              "Topology: expected a number of ranks per machine that divides the ", world_size,
              " ranks, got ", ranks_per_machine);
  std::vector<int> machine_of;
  for (int rank = 0; rank < world_size; ++rank) machine_of.push_back(rank / ranks_per_machine);
  return Topology(machine_of);
}

Topology::Topology(const std::vector<int>& machine_of) {
  TORCH_CHECK(!machine_of.empty(), "Topology: expected a machine for each rank, got no rank");
  std::map<int, int> numbers;
  for (const int machine : machine_of) {
    machine_of_.push_back(
        numbers.try_emplace(machine, static_cast<int>(numbers.size())).first->second);
  }
  machines_ = static_cast<int>(numbers.size());
}

int Topology::ranks_per_machine() const {
  const int ranks = world_size() / machines_;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (machine_of(rank) != rank / ranks) return 0;
  }
  return ranks;
}

bool Topology::has_two_levels() const { return machines_ > 1 && ranks_per_machine() > 1; }

Topology Topology::of_ranks(const std::vector<int>& ranks) const {
  std::vector<int> machine_of;
  for (const int rank : ranks) machine_of.push_back(this->machine_of(rank));
  return Topology(machine_of);
}

std::string Topology::describe() const {
  std::vector<int> ranks(static_cast<size_t>(machines_), 0);
  for (const int machine : machine_of_) ++ranks[static_cast<size_t>(machine)];
  const auto [least, most] = std::minmax_element(ranks.begin(), ranks.end());
  const auto counted = [](int count, const std::string& noun) {
    return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
  };
  std::string text = counted(machines_, "machine") + " with ";
  if (*least != *most)
    return text + std::to_string(*least) + " to " + counted(*most, "rank") + " each";
  text += counted(*least, "rank") + (machines_ == 1 ? "" : " each");
  return text + (ranks_per_machine() == 0 ? ", which do not follow one another" : "");
}

}  // namespace zero
