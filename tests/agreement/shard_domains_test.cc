// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/shard_domains.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

// Rank 1 of a mesh of 2 x 4: it shares its shards with ranks 0 to 3, and rank 5 has copies of them.
struct Grid {
  Group mesh = simulated_group(8, 1);
  Group row = mesh.subgroup({0, 1, 2, 3}, "row");
  Group column = mesh.subgroup({1, 5}, "column");
  Group alone = mesh.subgroup({1}, "alone");
};

TEST(ShardDomainsTest, WithoutPlacementsTheGroupIsTheOnlyDomain) {
  for (const int world_size : {1, 2, 3, 4}) {
    const ShardDomains domains = make_domains(simulated_group(world_size), ZeroOptions(), 3);
    ASSERT_EQ(domains.list.size(), 1u);
    EXPECT_FALSE(domains.list[0].replicas.has_value());
    EXPECT_EQ(domains.list[0].averaged_over, world_size);
    EXPECT_EQ(domains.of_group, (std::vector<int64_t>{0, 0, 0}));
    EXPECT_EQ(domains.norm_weights, (std::vector<double>{1, 1, 1}));
    EXPECT_TRUE(domains.uniform);
  }
}

TEST(ShardDomainsTest, AGradientIsAveragedOverShardsAndReplicas) {
  const Grid g;
  const auto options = ZeroOptions().mesh_group(g.mesh).placement(
      1, GroupPlacement().sharded_over(g.row).replicated_over(g.column));
  const ShardDomains domains = make_domains(g.mesh, options, 2);
  ASSERT_EQ(domains.list.size(), 2u);
  EXPECT_EQ(domains.of_group, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(domains.list[1].group.name(), g.row.name());
  EXPECT_EQ(domains.list[1].replicas->name(), g.column.name());
  EXPECT_EQ(domains.list[1].averaged_over, 8);
  // Of its copies on two ranks each counts half in the norm.
  EXPECT_EQ(domains.norm_weights, (std::vector<double>{1, 0.5}));
  EXPECT_TRUE(domains.uniform);
  for (const int64_t domain : {-1, 0, 1}) {  // ranks of others need not have this weight
    EXPECT_EQ(domains.describe(domain)[1],
              "placement of parameter group 1: shared by 4 ranks, copies on 2, averaged over 8" +
                  std::string(domain == 0 ? "" : ", weight in the norm 0.5") + ", domain 1");
  }
}

TEST(ShardDomainsTest, ASumIsDividedByNothing) {
  const Grid g;
  const auto options =
      ZeroOptions()
          .reduction(Reduction::kSum)
          .mesh_group(g.mesh)
          .placement(1, GroupPlacement().sharded_over(g.row))
          .placement(2, GroupPlacement().sharded_over(g.row).replicated_over(g.column));
  for (const ShardDomain& domain : make_domains(g.mesh, options, 3).list) {
    EXPECT_EQ(domain.averaged_over, 1) << domain.group.name();
  }
  expect_words(
      error_of([&] {
        make_domains(g.mesh, ZeroOptions(options).placement(1, GroupPlacement().averaged_over(8)),
                     3);
      }),
      {"placement of parameter group 1", "no averaged_over with Reduction::kSum", "got 8"});
}

TEST(ShardDomainsTest, GroupsWithOnePlacementShareADomain) {
  const Grid g;
  const auto row = GroupPlacement().sharded_over(g.row);
  const auto options = ZeroOptions()
                           .placement(0, row)
                           .placement(1, GroupPlacement(row).averaged_over(3))
                           .placement(2, GroupPlacement(row).averaged_over(4))
                           .placement(3, GroupPlacement(row).replicated_over(g.alone));
  const ShardDomains domains = make_domains(g.mesh, options, 5);
  EXPECT_EQ(domains.of_group, (std::vector<int64_t>{0, 1, 0, 0, 2}));
  EXPECT_EQ(domains.list[1].averaged_over, 3);
  // Ranks 4 to 7 hold something else.
  EXPECT_FALSE(domains.uniform);
}

TEST(ShardDomainsTest, WhatHomeSendsIsForTheReplicasOfAllThatIsTrainedOverIt) {
  const Group mesh = simulated_group(8);
  const Group home = mesh.subgroup({0, 1}, "home");
  const Group copies = mesh.subgroup({0, 2}, "copies");
  const Group more = mesh.subgroup({0, 2, 4, 6}, "more");
  const Group others = mesh.subgroup({0, 4}, "others");
  const auto over = [&](const std::optional<Group>& replicas) {
    return replicas ? GroupPlacement().replicated_over(*replicas) : GroupPlacement();
  };
  struct Case {
    std::vector<GroupPlacement> placements;
    int64_t home_domain;
    std::vector<int> ranks;  // of the replicas
    size_t domains;
    std::optional<Group> parts = std::nullopt;
  };
  const std::vector<Case> cases{
      {{over(copies), over(copies)}, 0, {0, 2}, 1},
      {{over(copies), over(std::nullopt)}, 1, {}, 2},
      {{over(std::nullopt), over(copies)}, 0, {}, 2},
      {{over(more), over(copies)}, 1, {0, 2}, 2},
      {{over(copies), over(more)}, 0, {0, 2}, 2},
      {{over(copies), over(others)}, 2, {}, 3},
      {{over(copies), GroupPlacement().sharded_over(mesh)}, 0, {0, 2}, 2},
      {{GroupPlacement().sharded_over(mesh)}, 1, {}, 2},
      {{over(copies)}, 1, {}, 2, copies},  // whose frozen tensors are other parts
      {{over(copies)}, 0, {0, 2}, 1, others},
      {{over(more)}, 1, {}, 2, others},
  };
  for (size_t c = 0; c < cases.size(); ++c) {
    ZeroOptions options = ZeroOptions().mesh_group(mesh);
    for (size_t g = 0; g < cases[c].placements.size(); ++g) {
      options.placement(static_cast<int64_t>(g), cases[c].placements[g]);
    }
    const auto whole = [](const std::string&) { return std::optional<int64_t>(); };
    if (cases[c].parts) options.tensor_parts({*cases[c].parts, whole});
    const auto groups = static_cast<int64_t>(cases[c].placements.size());
    const ShardDomains domains = make_domains(home, options, groups);
    EXPECT_EQ(domains.list.size(), cases[c].domains) << c;
    ASSERT_EQ(domains.home_domain, cases[c].home_domain) << c;
    const ShardDomain& d = domains.list[domains.home_domain];
    EXPECT_EQ(d.group.name(), home.name()) << c;
    EXPECT_EQ(d.replicas ? d.replicas->global_ranks() : std::vector<int>(), cases[c].ranks) << c;
    EXPECT_FALSE(domains.uniform) << c;  // others get nothing of it
  }
}

TEST(ShardDomainsTest, CopiesAndOtherOwnersAreLeftOutOfTheNorm) {
  const Grid g;
  const auto options =
      ZeroOptions()
          .placement(0, GroupPlacement().copies(4))
          .placement(1, GroupPlacement().owner(false))
          .placement(2, GroupPlacement().sharded_over(g.row).replicated_over(g.column).copies(2));
  EXPECT_EQ(make_domains(g.mesh, options, 3).norm_weights, (std::vector<double>{0.25, 0, 0.25}));
}

TEST(ShardDomainsTest, PlacementsThatCannotWorkAreRefused) {
  const Grid g;
  const auto refused = [&](int64_t index, const GroupPlacement& placement) {
    return error_of([&] { make_domains(g.mesh, ZeroOptions().placement(index, placement), 2); });
  };
  EXPECT_EQ(refused(1, GroupPlacement()), "");
  expect_words(refused(2, GroupPlacement()),
               {"placement of parameter group 2", "expected one of the 2 groups"});
  expect_words(refused(-1, GroupPlacement()), {"placement of parameter group -1"});
  expect_words(refused(0, GroupPlacement().replicated_over(g.column)),
               {"share only rank 1", "which share rank 5 too"});
  expect_words(refused(1, GroupPlacement().averaged_over(-1)), {"averaged_over of 0 or more"});
  expect_words(refused(1, GroupPlacement().copies(0)), {"copies of 1 or more"});
  expect_words(
      error_of([&] { make_domains(g.mesh, ZeroOptions().mesh_group(g.row), 1); }),
      {"optimizer: expected groups of ranks of the mesh", "with rank 4, which is not in group"});
  expect_words(error_of([&] {
                 make_domains(g.row,
                              ZeroOptions().mesh_group(g.row).placement(
                                  0, GroupPlacement().replicated_over(g.column)),
                              1);
               }),
               {"placement of parameter group 0", "with rank 5"});
}

}  // namespace
}  // namespace zero
