// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/group_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"

namespace zero {
namespace {

std::vector<std::string> names(const std::vector<Group>& groups) {
  std::vector<std::string> result;
  for (const Group& group : groups) result.push_back(group.name());
  return result;
}

TEST(GroupOrderTest, AnyOrderOfTheSameGroupsGivesOne) {
  const Group mesh = simulated_group(8, 1);
  std::vector<Group> groups{mesh.subgroup({0, 1}, "c"), mesh.subgroup({1, 2}, "a"),
                            mesh.subgroup({1, 3}, "b"), mesh.subgroup({1, 2}, "c")};
  std::vector<int> order{0, 1, 2, 3};
  const std::vector<std::string> expected{mesh.name() + "/a", mesh.name() + "/b",
                                          mesh.name() + "/c", mesh.name() + "/c"};
  do {
    std::vector<Group> given;
    for (const int i : order) given.push_back(groups[i]);
    const std::vector<Group> agreed = agreed_order(given);
    EXPECT_EQ(names(agreed), expected);
    EXPECT_EQ(agreed[2].global_ranks(), (std::vector<int>{0, 1}));
    EXPECT_EQ(agreed[3].global_ranks(), (std::vector<int>{1, 2}));
  } while (std::next_permutation(order.begin(), order.end()));
}

// As the groups of one dimension of a mesh, which have one name on all ranks.
TEST(GroupOrderTest, RanksOfDifferentGroupsOfOneNameTakeThemAlike) {
  std::vector<std::vector<std::string>> orders;
  for (const int rank : {0, 5}) {
    const Group mesh = simulated_group(8, rank);
    const int row = rank / 4 * 4, column = rank % 4;
    orders.push_back(names(agreed_order({mesh.subgroup({row, row + 1, row + 2, row + 3}, "x"),
                                         mesh.subgroup({column, column + 4}, "replicas")})));
  }
  EXPECT_EQ(orders[0], orders[1]);
}

TEST(GroupOrderTest, EachGroupComesOnceAndThoseOfOneRankNever) {
  const Group mesh = simulated_group(4, 1);
  EXPECT_EQ(agreed_order({mesh, mesh.subgroup({1}, "alone"), mesh}).size(), 1u);
  EXPECT_TRUE(agreed_order({simulated_group(1)}).empty());
  EXPECT_EQ(key_of(mesh), key_of(Group(mesh)));
}

}  // namespace
}  // namespace zero
