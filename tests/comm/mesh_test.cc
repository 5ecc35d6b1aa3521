// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which ranks a mesh puts together, and that the same question has one answer.
#include "zero/mesh.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

using Ranks = std::vector<int>;

std::string refusal(int world_size, const std::vector<Mesh::Dimension>& dimensions) {
  return error_of([&] { Mesh mesh(simulated_group(world_size), dimensions); });
}

TEST(MeshTest, TheLastDimensionVariesFastest) {
  const Mesh mesh(simulated_group(12, 7), {{"pp", 2}, {"dp", 3}, {"tp", 2}});
  EXPECT_EQ(mesh.coordinate("pp"), 1);
  EXPECT_EQ(mesh.coordinate("dp"), 0);
  EXPECT_EQ(mesh.coordinate("tp"), 1);
  EXPECT_EQ(mesh.size("dp"), 3);
  EXPECT_EQ(mesh.group({"pp"}).global_ranks(), (Ranks{1, 7}));
  EXPECT_EQ(mesh.group({"dp"}).global_ranks(), (Ranks{7, 9, 11}));
  EXPECT_EQ(mesh.group({"tp"}).global_ranks(), (Ranks{6, 7}));
  EXPECT_EQ(mesh.group({"tp", "dp"}).global_ranks(), (Ranks{6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(mesh.group({"pp", "tp"}).global_ranks(), (Ranks{0, 1, 6, 7}));
  EXPECT_EQ(mesh.group({"pp", "tp"}).rank(), 3);
  EXPECT_EQ(mesh.group({"tp"}).name(), "simulated/tp");
}

TEST(MeshTest, AllDimensionsAreTheGroupItselfAndNoneIsThisRank) {
  const Mesh mesh(simulated_group(4, 2), {{"dp", 2}, {"one", 1}, {"tp", 2}});
  EXPECT_EQ(mesh.group({"tp", "dp"}).name(), mesh.all().name());
  EXPECT_EQ(mesh.group({}).global_ranks(), (Ranks{2}));
  EXPECT_EQ(mesh.group({"one"}).world_size(), 1);
}

TEST(MeshTest, OneGroupHoweverItIsAskedFor) {
  run_ranks(8, [](const Group& world) {
    const Mesh mesh(world, {{"pp", 2}, {"dp", 2}, {"one", 1}, {"tp", 2}});
    const Mesh copy = mesh;
    // Asked for in another order on every second rank; no communicator is made yet.
    const std::vector<std::string> first =
        world.rank() % 2 ? std::vector<std::string>{"pp"} : std::vector<std::string>{"tp"};
    mesh.group(first);
    const auto connect = [](const Group& group) {
      return group.shared_communicator("test", Purpose::kControl);
    };
    const auto pair = connect(mesh.group({"dp", "tp"}));
    EXPECT_EQ(connect(mesh.group({"tp", "dp"})), pair);
    EXPECT_EQ(connect(copy.group({"tp", "one", "dp"})), pair);
    EXPECT_NE(connect(mesh.group({"pp"})), pair);
    EXPECT_EQ(pair->world_size(), 4);
  });
}

// Every rank finds the same peers: the sum over each group, checked against arithmetic.
TEST(MeshTest, GroupsMeetTheRanksTheyName) {
  run_ranks(8, [](const Group& world) {
    const Mesh mesh(world, {{"a", 2}, {"b", 2}, {"c", 2}});
    for (const std::vector<std::string>& names : std::vector<std::vector<std::string>>{
             {"a"}, {"b"}, {"c"}, {"a", "b"}, {"a", "c"}, {"b", "c"}, {"a", "b", "c"}}) {
      const Group group = mesh.group(names);
      double expected = 0;
      for (const int rank : group.global_ranks()) expected += rank * rank;
      at::Tensor sum = at::empty({1}, at::kDouble);
      sum.fill_(world.rank() * world.rank());
      group.shared_communicator("sum", Purpose::kData)->all_reduce_sum(sum, "test").wait();
      EXPECT_EQ(sum.item<double>(), expected);
    }
  });
}

TEST(MeshTest, ArgumentsThatMakeNoGridAreRefused) {
  EXPECT_NE(refusal(4, {{"dp", 2}}).find("product is 4"), std::string::npos);
  EXPECT_NE(refusal(4, {{"dp", 2}, {"tp", 3}}).find("got 6"), std::string::npos);
  EXPECT_NE(refusal(4, {{"dp", 2}, {"dp", 2}}).find("twice"), std::string::npos);
  EXPECT_NE(refusal(4, {{"", 4}}).find("name"), std::string::npos);
  EXPECT_NE(refusal(4, {{"a+b", 4}}).find("a+b"), std::string::npos);
  EXPECT_NE(refusal(4, {{"dp", 0}}).find("at least 1"), std::string::npos);
  EXPECT_EQ(refusal(4, {{"dp", 2}, {"tp", 2}}), "");
  const Mesh mesh(simulated_group(4), {{"dp", 2}, {"tp", 2}});
  EXPECT_THROW(mesh.group({"ep"}), c10::Error);
  EXPECT_THROW(mesh.group({"tp", "tp"}), c10::Error);
  EXPECT_THROW(mesh.size("ep"), c10::Error);
}

}  // namespace
}  // namespace zero
