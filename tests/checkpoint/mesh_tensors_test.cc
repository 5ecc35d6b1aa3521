// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The tensors of all ranks are merged into one list, or refused with the ranks that disagree.
#include "zero/checkpoint/match/mesh_tensors.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

HeldTensor held(const std::string& name, int64_t first_rank, int64_t index, int64_t group = 0,
                int64_t norm_copies = 1) {
  return {{name, {2, 3}, {3, 1}, c10::ScalarType::Float, group}, index, first_rank, norm_copies, 0};
}

std::vector<std::string> names(const std::vector<ManifestParameter>& list) {
  std::vector<std::string> result;
  for (const ManifestParameter& p : list) result.push_back(p.name);
  return result;
}

const OptionGroups kOptions{{{"lr", 0.1}}, {{"lr", 0.2}}};

TEST(MeshTensorsTest, NamesAreMergedInTheOrderOfTheirSets) {
  // Ranks 0 and 1 share a stage and describe half of it each; rank 2 is another one.
  std::vector<HeldTensors> all(3);
  all[0] = {{held("a", 0, 0)}, {}, {}, kOptions};
  all[1] = {{held("b", 0, 1, 1)}, {}, {}, {}};
  all[2] = {{held("c", 2, 0, 1)}, {held("f", 2, 0, 0, 0)}, {held("m", 2, 0, 0, 0)}, kOptions};
  const MeshTensors mesh(all);
  EXPECT_EQ(names(mesh.parameters()), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(names(mesh.frozen()), std::vector<std::string>{"f"});
  EXPECT_EQ(names(mesh.buffers()), std::vector<std::string>{"m"});
  EXPECT_EQ(mesh.sets(), 2);
  EXPECT_EQ(mesh.groups(), kOptions);
  EXPECT_EQ(mesh.parameters()[2].group, 1);
  EXPECT_TRUE(mesh.stores("b", 0));
  EXPECT_FALSE(mesh.stores("b", 2));
  EXPECT_TRUE(mesh.has("c"));
  EXPECT_FALSE(mesh.has("d"));
}

TEST(MeshTensorsTest, GroupsOfEqualOptionsAreOneAndOthersGetNewNumbers) {
  std::vector<HeldTensors> all(3);
  all[0] = {{held("a", 0, 0, 1)}, {}, {}, kOptions};
  all[1] = {{held("b", 1, 0, 0), held("c", 1, 1, 1)}, {}, {}, {kOptions[1], {{"lr", 0.3}}}};
  all[2] = {{held("d", 2, 0, 0)}, {}, {}, {{{"lr", 0.3}}}};
  const MeshTensors mesh(all);
  EXPECT_EQ(mesh.groups(), (OptionGroups{kOptions[0], kOptions[1], {{"lr", 0.3}}}));
  std::vector<int64_t> groups;
  for (const ManifestParameter& p : mesh.parameters()) groups.push_back(p.group);
  EXPECT_EQ(groups, (std::vector<int64_t>{1, 1, 2, 2}));
}

TEST(MeshTensorsTest, CopiesAreStoredByTheLowestHolder) {
  std::vector<HeldTensors> all(2);
  all[0] = {{held("shared", 0, 0, 0, 1), held("norm", 0, 1, 0, 2)}, {}, {}, kOptions};
  all[1] = {{held("shared", 1, 0, 0, 0), held("norm", 1, 1, 0, 2)}, {}, {}, kOptions};
  const MeshTensors mesh(all);
  EXPECT_EQ(names(mesh.parameters()), (std::vector<std::string>{"shared", "norm"}));
  for (const char* name : {"shared", "norm"}) {
    EXPECT_TRUE(mesh.stores(name, 0));
    EXPECT_FALSE(mesh.stores(name, 1));
  }
}

TEST(MeshTensorsTest, CopiesMayDifferInStridesOfOneElement) {
  std::vector<HeldTensors> all(2);
  all[0] = {{held("w", 0, 0, 0, 2)}, {}, {}, kOptions};
  all[1] = {{held("w", 1, 0, 0, 2)}, {}, {}, kOptions};
  for (HeldTensors& rank : all) rank.parameters[0].about.shape = {2, 1};
  all[0].parameters[0].about.strides = {1, 1};
  all[1].parameters[0].about.strides = {1, 2};
  EXPECT_EQ(MeshTensors(all).parameters().size(), 1u);
}

void expect_refused(const HeldTensors& first, const HeldTensors& second,
                    const std::vector<std::string>& words) {
  expect_words(error_of([&] { MeshTensors({first, second}); }), words);
}

TEST(MeshTensorsTest, OneNameForDifferentTensorsIsRefused) {
  const HeldTensors a{{held("w", 0, 0)}, {}, {}, kOptions};
  HeldTensors b{{held("w", 1, 0)}, {}, {}, kOptions};
  expect_refused(a, b, {"parameter w", "ranks that begin with 0, 1", "counts it 2 times", "own"});
  b.parameters[0].norm_copies = 0;
  b.parameters[0].about.shape = {6, 1};
  expect_refused(a, b, {"w: expected one shape", "[2, 3] on rank 0 and [6, 1] on rank 1"});
  b.parameters[0].about.shape = {2, 3};
  b.parameters[0].about.strides = {1, 2};
  expect_refused(a, b, {"memory order", "[3, 1] on rank 0 and [1, 2] on rank 1"});
  b.parameters[0].about.strides = {3, 1};
  b.parameters[0].about.dtype = c10::ScalarType::Half;
  expect_refused(a, b, {"w: expected one dtype", "Float on rank 0 and Half on rank 1"});
  const HeldTensors frozen{{}, {held("w", 1, 0, 0, 0)}, {}, kOptions};
  expect_refused(a, frozen,
                 {"w: expected a tensor of one kind", "a parameter", "frozen", "rank 1"});
  HeldTensors other{{}, {held("w", 0, 0, 0, 0)}, {}, kOptions};
  other.frozen[0].hash = 7;
  expect_refused(other, frozen, {"frozen parameter w", "same values", "rank 1 than on rank 0"});
}

HeldTensor part(int64_t first_rank, int64_t number, int64_t parts, std::vector<int64_t> shape) {
  HeldTensor t = held("w", first_rank, 0);
  t.about.shape = std::move(shape);
  t.about.strides = {t.about.shape[1], 1};
  t.part = number;
  t.parts = parts;
  t.dimension = 1;
  return t;
}

TEST(MeshTensorsTest, PartsFollowEachOtherInTheWhole) {
  // Ranks 0 and 1 hold the parts, and ranks 2 and 3 copies of them.
  std::vector<HeldTensors> all(4);
  for (int64_t r = 0; r < 4; ++r) {
    all[r] = {{part(r, r % 2, 2, {2, r % 2 == 0 ? 4 : 3})}, {}, {}, kOptions};
    all[r].parameters[0].norm_copies = 2;
  }
  const MeshTensors mesh(all, /*own_part=*/1);
  ASSERT_EQ(mesh.parameters().size(), 2u);
  EXPECT_EQ(stored_name(mesh.parameters()[0]), "w{1:0:4}");
  EXPECT_EQ(stored_name(mesh.parameters()[1]), "w{1:4:7}");
  EXPECT_EQ(mesh.own("w").whole, (std::vector<int64_t>{2, 7}));
  EXPECT_EQ(mesh.own("w").from, 4);
  EXPECT_TRUE(mesh.stores("w", 1));
  EXPECT_FALSE(mesh.stores("w", 0));
  EXPECT_FALSE(mesh.stores("w", 3));
}

TEST(MeshTensorsTest, PartsThatDoNotMakeUpAWholeAreRefused) {
  const HeldTensors a{{part(0, 0, 2, {2, 4})}, {}, {}, kOptions};
  expect_refused(a, {{part(1, 1, 2, {3, 4})}, {}, {}, kOptions},
                 {"parameter w", "differ along dimension 1", "[2, 4]", "[3, 4]", "tensor_parts()"});
  expect_refused(a, {{part(1, 1, 3, {2, 4})}, {}, {}, kOptions},
                 {"one of 2 parts along dimension 1 on rank 0", "one of 3 parts"});
  expect_refused(a, {{held("w", 1, 0)}, {}, {}, kOptions}, {"a whole tensor on rank 1"});
  expect_refused({{held("w", 0, 0)}, {}, {}, kOptions}, {{part(1, 0, 2, {2, 4})}, {}, {}, kOptions},
                 {"a whole tensor on rank 0", "one of 2 parts"});
  expect_refused(a, {{part(1, 0, 2, {2, 4})}, {}, {}, kOptions},
                 {"all of its 2 parts", "with number 1"});
}

HeldTensors fused(int64_t number, int64_t columns, std::vector<int64_t> sections) {
  HeldTensors all{{part(number, number, 2, {2, columns})}, {}, {}, kOptions};
  all.parameters[0].sections = std::move(sections);
  return all;
}

TEST(MeshTensorsTest, APartOfAFusedTensorHasAnEqualShareOfEachSection) {
  const MeshTensors mesh({fused(0, 4, {2, 6}), fused(1, 4, {2, 6})}, /*own_part=*/1);
  const TensorPart part = part_of(mesh.own("w"));
  ASSERT_EQ(part.boxes.size(), 2u);
  EXPECT_EQ(part.boxes[0].from, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(part.boxes[0].sizes, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(part.boxes[1].from, (std::vector<int64_t>{0, 5}));
  EXPECT_EQ(part.boxes[1].sizes, (std::vector<int64_t>{2, 3}));
}

TEST(MeshTensorsTest, SectionsThatDoNotMakeUpAWholeAreRefused) {
  for (const std::vector<int64_t>& sections :
       {std::vector<int64_t>{2, 4}, std::vector<int64_t>{3, 5}, std::vector<int64_t>{8, 0},
        std::vector<int64_t>{10, -2}}) {
    expect_refused(fused(0, 4, sections), fused(1, 4, sections),
                   {"w: expected sections of 8 elements of dimension 1", "2 equal parts"});
  }
  expect_refused(fused(0, 5, {4, 4}), fused(1, 3, {4, 4}), {"2 equal parts"});
  expect_refused(
      fused(0, 4, {2, 6}), fused(1, 4, {}),
      {"of the sections [2, 6] on rank 0", "one of 2 parts along dimension 1 on rank 1"});
}

TEST(MeshTensorsTest, TextBringsEverythingBack) {
  HeldTensors h{{held("a", 3, 5, 1, 2)}, {held("f", 3, 0)}, {held("m", 3, 1)}, kOptions};
  h.frozen[0].hash = 0xfedcba9876543210u;
  h.parameters[0].part = 2;
  h.parameters[0].parts = 4;
  h.parameters[0].sections = {4, 8};
  h.parameters[0].dimension = 1;
  const HeldTensors back = parse_held(held_text(h), "text");
  EXPECT_EQ(held_text(back), held_text(h));
  EXPECT_EQ(back.parameters[0].sections, (std::vector<int64_t>{4, 8}));
  EXPECT_EQ(back.frozen[0].hash, 0xfedcba9876543210u);
}

}  // namespace
}  // namespace zero
