// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/shard_domains.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>  // prints a list of ranks

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "zero/base/plain_text.h"
#include "zero/comm/group_order.h"

namespace zero {
namespace {

int64_t ranks_of(const std::optional<Group>& group) { return group ? group->world_size() : 1; }

// With its replicas.
int64_t ranks_in(const ShardDomain& domain) {
  return domain.group.world_size() * ranks_of(domain.replicas);
}

bool has(const Group& group, int rank) {
  return std::ranges::find(group.global_ranks(), rank) != group.global_ranks().end();
}

// Returns a rank of both groups other than this one.
std::optional<int> shared_rank(const Group& a, const Group& b) {
  for (const int rank : b.global_ranks()) {
    if (rank != a.global_rank() && has(a, rank)) return rank;
  }
  return std::nullopt;
}

// An element that two ranks own and hold copies of would be averaged twice.
void check_disjoint(const Group& group, const Group& replicas, const std::string& where) {
  const std::optional<int> rank = shared_rank(group, replicas);
  TORCH_CHECK(!rank, where, ": expected a reduce group and a replicate group that share only rank ",
              group.global_rank(), ", got \"", group.name(), "\" and \"", replicas.name(),
              "\", which share rank ", *rank, " too; take them from different mesh dimensions");
}

// Returns the domain over home whose replicas all others over home have too, or the end of the
// list: other replicas have parts of their own of what home sends.
size_t domain_with_copies(const ShardDomains& domains) {
  const std::vector<ShardDomain>& list = domains.list;
  std::vector<size_t> over_home;
  for (size_t d = 0; d < list.size(); ++d) {
    if (key_of(list[d].group) == key_of(domains.home)) over_home.push_back(d);
  }
  if (over_home.empty()) return list.size();
  const size_t least = *std::ranges::min_element(
      over_home, {}, [&](size_t d) { return ranks_of(list[d].replicas); });
  if (!list[least].replicas) return least;
  const bool common = std::ranges::all_of(over_home, [&](size_t d) {
    return std::ranges::all_of(list[least].replicas->global_ranks(),
                               [&](int rank) { return has(*list[d].replicas, rank); });
  });
  return common ? least : list.size();
}

// Checks that groups are of ranks of the mesh. Parameter groups, of which there may be thousands,
// share groups of ranks: each is looked at once.
class MeshRanks {
 public:
  explicit MeshRanks(const Group& mesh)
      : mesh_(mesh), ranks_(mesh.global_ranks().begin(), mesh.global_ranks().end()) {}

  void check(const Group& group, const std::string& where) {
    if (!checked_.insert(key_of(group)).second) return;
    for (const int rank : group.global_ranks()) {
      TORCH_CHECK(ranks_.contains(rank), where,
                  ": expected groups of ranks of the mesh, got group \"", group.name(),
                  "\" with rank ", rank, ", which is not in group \"", mesh_.name(),
                  "\"; give mesh_group() all ranks that train the model together");
    }
  }

 private:
  const Group& mesh_;
  const std::unordered_set<int> ranks_;
  std::set<GroupKey> checked_;
};

void check_numbers(const GroupPlacement& placement, Reduction reduction, const std::string& where) {
  TORCH_CHECK(placement.averaged_over() >= 0, where, ": expected averaged_over of 0 or more, got ",
              placement.averaged_over());
  TORCH_CHECK(reduction != Reduction::kSum || placement.averaged_over() == 0, where,
              ": expected no averaged_over with Reduction::kSum, which divides by nothing, got ",
              placement.averaged_over(),
              "; divide the loss by the size of the whole batch, and leave averaged_over out");
  TORCH_CHECK(placement.copies() >= 1, where, ": expected copies of 1 or more, got ",
              placement.copies());
}

int64_t divisor_of(const ShardDomain& domain, const GroupPlacement& placement,
                   const ZeroOptions& options) {
  if (placement.averaged_over() > 0) return placement.averaged_over();
  if (options.reduction() == Reduction::kSum) return 1;
  if (options.micro_batches() > 0) return options.micro_batches();
  return ranks_in(domain);
}

// The domain of a parameter group that is at `placement` of an optimizer over `group`.
ShardDomain domain_of(const GroupPlacement& placement, const Group& group,
                      const ZeroOptions& options, MeshRanks& mesh, const std::string& where) {
  ShardDomain domain{placement.sharded_over().value_or(group), placement.replicated_over()};
  if (ranks_of(domain.replicas) == 1) domain.replicas.reset();
  mesh.check(domain.group, where);
  if (domain.replicas) {
    mesh.check(*domain.replicas, where);
    check_disjoint(domain.group, *domain.replicas, where);
  }
  check_numbers(placement, options.reduction(), where);
  domain.averaged_over = divisor_of(domain, placement, options);
  return domain;
}

// Returns the number of home in the list, to which it is added where no domain of parameter groups
// is.
int64_t choose_home(ShardDomains& domains, const ZeroOptions& options) {
  size_t home = domain_with_copies(domains);
  const auto& parts = options.tensor_parts();
  if (parts && home < domains.list.size() && domains.list[home].replicas &&
      shared_rank(parts->group, *domains.list[home].replicas)) {
    home = domains.list.size();
  }
  if (home == domains.list.size()) domains.list.push_back({domains.home, std::nullopt});
  return static_cast<int64_t>(home);
}

}  // namespace

ShardDomains make_domains(const Group& group, const ZeroOptions& options,
                          int64_t parameter_groups) {
  ShardDomains domains{group, options.mesh_group().value_or(group)};
  domains.two_level = options.two_level();
  MeshRanks mesh(domains.mesh);
  mesh.check(group, "optimizer");
  if (const auto& parts = options.tensor_parts()) {
    mesh.check(parts->group, "tensor_parts()");
    TORCH_CHECK(parts->dimension != nullptr,
                "tensor_parts(): expected a function that returns dimensions, got none");
  }
  for (const auto& [index, placement] : options.placements()) {
    TORCH_CHECK(0 <= index && index < parameter_groups, "placement of parameter group ", index,
                ": expected one of the ", parameter_groups, " groups of the inner optimizer");
  }
  // Groups with one placement share a domain.
  std::map<std::tuple<GroupKey, GroupKey, int64_t>, int64_t> known;
  for (int64_t g = 0; g < parameter_groups; ++g) {
    const auto found = options.placements().find(g);
    const GroupPlacement placement =
        found == options.placements().end() ? GroupPlacement() : found->second;
    ShardDomain domain = domain_of(placement, group, options, mesh,
                                   "placement of parameter group " + std::to_string(g));
    const int64_t holders = ranks_of(domain.replicas) * placement.copies();
    domains.norm_weights.push_back(placement.owner() ? 1.0 / static_cast<double>(holders) : 0.0);
    const auto [entry, added] = known.try_emplace(
        {key_of(domain.group), domain.replicas ? key_of(*domain.replicas) : GroupKey(),
         domain.averaged_over},
        domains.list.size());
    if (added) domains.list.push_back(std::move(domain));
    domains.of_group.push_back(entry->second);
  }
  domains.home_domain = choose_home(domains, options);
  // Ranks that get nothing of what home sends may hold other frozen tensors.
  domains.uniform = std::ranges::all_of(
      domains.list, [&](const ShardDomain& d) { return ranks_in(d) == domains.mesh.world_size(); });
  return domains;
}

bool ShardDomains::has_parameter_groups(int64_t domain) const {
  return std::ranges::find(of_group, domain) != of_group.end();
}

bool ShardDomains::has_two_levels(const Group& group) const {
  return two_level && group.topology().has_two_levels() &&
         std::none_of(list.begin(), list.end(), [&](const ShardDomain& d) {
           return d.one_level && key_of(d.group) == key_of(group);
         });
}

std::vector<std::string> ShardDomains::describe(int64_t domain) const {
  std::vector<std::string> lines;
  for (size_t g = 0; g < of_group.size(); ++g) {
    const ShardDomain& d = list[of_group[g]];
    // A group of the whole mesh is the same on all ranks, and so is the order of its ranks.
    const bool ordered =
        d.group.world_size() == mesh.world_size() && key_of(d.group) != key_of(mesh);
    lines.push_back(
        "placement of parameter group " + std::to_string(g) + ": shared by " +
        std::to_string(d.group.world_size()) + " ranks, copies on " +
        std::to_string(ranks_of(d.replicas)) + ", averaged over " +
        std::to_string(d.averaged_over) +
        (domain < 0 || of_group[g] == domain ? plain_text(", weight in the norm ", norm_weights[g])
                                             : "") +
        ", domain " + std::to_string(of_group[g]) +
        (ordered ? plain_text(", in the order of ranks ", d.group.global_ranks()) : ""));
  }
  return lines;
}

}  // namespace zero
