// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which ranks of a group share a machine: they reach each other through memory, and all others
// through a link that they share.
//
//   zero::Topology::of_equal_machines(8, 4)  // ranks 0 to 3 on one machine, 4 to 7 on another
#pragma once

#include <string>
#include <vector>

namespace zero {

// A value. Machines are numbered in the order of their first rank.
class Topology {
 public:
  static Topology of_one_machine(int world_size);
  // Throws c10::Error unless `ranks_per_machine` divides `world_size`.
  static Topology of_equal_machines(int world_size, int ranks_per_machine);
  // Ranks r and s share a machine if machine_of[r] == machine_of[s]. Throws c10::Error when it is
  // empty.
  explicit Topology(const std::vector<int>& machine_of);

  int world_size() const { return static_cast<int>(machine_of_.size()); }
  int machines() const { return machines_; }
  int machine_of(int rank) const { return machine_of_.at(static_cast<size_t>(rank)); }

  // Returns L if rank r is on machine r / L for every r; 0 if machines have different numbers of
  // ranks, or ranks of one machine do not follow one another.
  int ranks_per_machine() const;
  // True for several machines with several ranks each, as ranks_per_machine() says: exchanges then
  // work in two levels.
  bool has_two_levels() const;

  // Returns the topology of a subgroup: its rank r is rank `ranks[r]` here.
  Topology of_ranks(const std::vector<int>& ranks) const;

  // For example "2 machines with 4 ranks each".
  std::string describe() const;

  friend bool operator==(const Topology&, const Topology&) = default;

 private:
  std::vector<int> machine_of_;
  int machines_ = 0;
};

}  // namespace zero
