// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/group_memberships.h"

#include <c10/util/Logging.h>  // prints a list of ranks

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "zero/agreement/fingerprint.h"
#include "zero/agreement/same_on_all_ranks.h"
#include "zero/base/plain_text.h"
#include "zero/comm/group_order.h"

namespace zero {
namespace {

constexpr const char* kAdvice =
    "; take both groups from dimensions of one Mesh, or list the ranks of all groups in one order";

// Equal for equal groups.
std::string group_fingerprint(const Group& group) {
  const auto [name, ranks] = key_of(group);
  const Fingerprint words = fingerprint_of(plain_text(name, "/", ranks));
  return plain_text(words[0], "/", words[2]);
}

// Equal where ranks send to each other over home.
std::string home_fingerprint(const ShardDomains& all) {
  return group_fingerprint(all.home) + (all.list[all.home_domain].replicas ? "/copies" : "");
}

// What a rank has as one of its domains.
struct Membership {
  std::string place;     // in the group
  std::string group;     // its fingerprint
  std::string replicas;  // the same; without replicas that of the group
  std::string copy;      // the place in the replicas
};

struct Memberships {
  std::string home;  // its fingerprint
  std::vector<Membership> domains;
};

// By global rank, of all ranks of the mesh.
using Table = std::map<int, Memberships>;

// Of domain `d` of that rank; empty if it has none.
Membership membership(const Table& table, int rank, size_t d) {
  const std::vector<Membership>& domains = table.at(rank).domains;
  return d < domains.size() ? domains[d] : Membership();
}

// Collective over the mesh.
Table gather_memberships(Communicator& control, const ShardDomains& all) {
  std::string own = home_fingerprint(all);
  for (const ShardDomain& d : all.list) {
    own += plain_text("\n", d.group.rank(), " ", group_fingerprint(d.group), " ",
                      group_fingerprint(d.replicas.value_or(d.group)), " ",
                      d.replicas ? d.replicas->rank() : 0);
  }
  const std::vector<std::string> texts = control.all_gather_text(own, "groups of domains");
  Table table;
  for (size_t r = 0; r < texts.size(); ++r) {
    std::istringstream words(texts[r]);
    Memberships& row = table[all.mesh.global_ranks()[r]];
    words >> row.home;
    for (Membership m; words >> m.place >> m.group >> m.replicas >> m.copy;) {
      row.domains.push_back(m);
    }
  }
  return table;
}

// These return what is wrong with a group of this rank; empty if nothing is.

std::string problem_of_home(const ShardDomains& all, const Table& table) {
  for (const int rank : all.home.global_ranks()) {
    if (table.at(rank).home == home_fingerprint(all)) continue;
    return c10::str("optimizer: expected one group on all ranks of \"", all.home.name(),
                    "\", got another, or other placements or tensor_parts() over it, on rank ",
                    rank, "; give the constructor the same on all of them");
  }
  return {};
}

std::string problem_in_group(const ShardDomains& all, size_t d, const Table& table) {
  const Group& group = all.list[d].group;
  const int here = group.global_rank();
  const Membership own = membership(table, here, d);
  std::map<std::string, std::set<std::string>> joined;  // by replicas: the groups with copies there
  for (const auto& [rank, row] : table) {
    if (d < row.domains.size()) joined[row.domains[d].replicas].insert(row.domains[d].group);
  }
  for (const int rank : group.global_ranks()) {
    const Membership other = membership(table, rank, d);
    if (other.group != own.group) {
      const auto first = std::ranges::find(all.of_group, static_cast<int64_t>(d));
      return c10::str(all.describe(static_cast<int64_t>(d))[first - all.of_group.begin()],
                      "; expected the same on all ranks of sharded_over(\"", group.name(),
                      "\"), got another group on rank ", rank,
                      "; give parameter groups and placements in one order on all ranks");
    }
    if (other.replicas != own.replicas && joined[other.replicas] != joined[own.replicas]) {
      return c10::str("replicated_over(): expected all ranks of sharded_over(\"", group.name(),
                      "\") to have copies in the same groups, got others of rank ", here,
                      " than of rank ", rank, kAdvice);
    }
    if (other.copy != own.copy) {
      return c10::str("replicated_over(): expected all ranks of sharded_over(\"", group.name(),
                      "\") to have one place among the copies, got place ", own.copy, " on rank ",
                      here, " and place ", other.copy, " on rank ", rank, kAdvice);
    }
  }
  return {};
}

std::string problem_in_replicas(const ShardDomains& all, size_t d, const Table& table) {
  const Group& replicas = *all.list[d].replicas;
  const int here = replicas.global_rank();
  const Membership own = membership(table, here, d);
  const std::string name = c10::str("replicated_over(\"", replicas.name(), "\"): expected ");
  for (const int rank : replicas.global_ranks()) {
    const Membership other = membership(table, rank, d);
    if (other.replicas != own.replicas) {
      return c10::str(name, "the same on all its ranks, got another or none on rank ", rank,
                      "; give all of them the placement");
    }
    if (other.place != own.place) {
      return c10::str(name,
                      "ranks that have one place in their sharded_over(), since they hold copies "
                      "of one shard, got place ",
                      own.place, " on rank ", here, " and place ", other.place, " on rank ", rank,
                      kAdvice);
    }
  }
  return {};
}

std::string problem_of_groups(const ShardDomains& all, const Table& table) {
  std::string problem = problem_of_home(all, table);
  for (size_t d = 0; d < all.list.size() && problem.empty(); ++d) {
    if (!all.has_parameter_groups(static_cast<int64_t>(d))) continue;  // home, as above
    problem = problem_in_group(all, d, table);
    if (problem.empty() && all.list[d].replicas) {
      problem = problem_in_replicas(all, d, table);
    }
  }
  return problem;
}

}  // namespace

void check_groups(Communicator& control, const ShardDomains& all) {
  const auto has_replicas = [](const ShardDomain& d) { return d.replicas.has_value(); };
  // Where it is uniform, all ranks have agreed on which domains have replicas, and on whether home
  // is the mesh.
  const bool home_is_mesh = key_of(all.home) == key_of(all.mesh);
  if (all.uniform && home_is_mesh && std::ranges::none_of(all.list, has_replicas)) return;
  check_same_on_all_ranks(control, problem_of_groups(all, gather_memberships(control, all)), {});
}

}  // namespace zero
