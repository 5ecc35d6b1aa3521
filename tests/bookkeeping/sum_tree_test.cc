// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The tree against its definition: every addition, as text.
#include "bookkeeping/sum_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

// The definition: numbers from `count` on are left out.
std::string text_of(int64_t begin, int64_t size, int64_t count) {
  if (size == 1) return std::to_string(begin);
  if (begin + size / 2 >= count) return text_of(begin, size / 2, count);
  return "(" + text_of(begin, size / 2, count) + "+" + text_of(begin + size / 2, size / 2, count) +
         ")";
}

std::string text_of(const TreeNode& node, int64_t count) {
  return text_of(node.begin, node.size, count);
}

std::string whole(int64_t count) {
  int64_t size = 1;
  while (size < count) size *= 2;
  return text_of(0, size, count);
}

TEST(SumTreeTest, AllPartsTogetherMakeTheSameAdditions) {
  for (int64_t count = 1; count <= 40; ++count) {
    for (int64_t parts = 1; parts <= count; ++parts) {
      const SumTree tree(count, parts);
      std::vector<TreeNode> all;
      std::vector<std::string> values;
      EXPECT_EQ(tree.begin(0), 0);
      EXPECT_EQ(tree.begin(parts), count);
      for (int64_t part = 0; part < parts; ++part) {
        EXPECT_LT(tree.begin(part), tree.begin(part + 1));
        // Numbers one by one, as micro-batches come.
        TreeStack<std::string> stack(tree);
        for (int64_t i = tree.begin(part); i < tree.begin(part + 1); ++i) {
          stack.push({i, 1}, std::to_string(i), [](std::string& lower, const std::string& upper) {
            lower = "(" + lower + "+" + upper + ")";
          });
        }
        const std::vector<TreeNode> nodes = tree.nodes(part);
        ASSERT_EQ(nodes.size(), stack.entries().size());
        EXPECT_LE(static_cast<int64_t>(nodes.size()), tree.most_nodes());
        for (size_t n = 0; n < nodes.size(); ++n) {
          EXPECT_EQ(nodes[n], stack.entries()[n].first);
          EXPECT_EQ(stack.entries()[n].second, text_of(nodes[n], count));
          all.push_back(nodes[n]);
          values.push_back(stack.entries()[n].second);
        }
      }
      for (const TreeAddition& a : tree.additions(all)) {
        values[a.into] = "(" + values[a.into] + "+" + values[a.from] + ")";
        values[a.from] = "used";
      }
      EXPECT_EQ(values[0], whole(count)) << parts << " parts of " << count;
    }
  }
}

TEST(SumTreeTest, PlacesHoldOneSumAtATime) {
  for (int64_t count : {2, 3, 7, 12, 24, 64, 100}) {
    const SumTree tree(count, count);
    std::vector<TreeNode> all;
    for (int64_t part = 0; part < count; ++part) all.push_back(tree.nodes(part).front());
    std::vector<int64_t> at(64, -1);  // by place: the value that is there
    for (const TreeAddition& a : tree.additions(all)) {
      ASSERT_LT(a.place, 8);
      EXPECT_TRUE(at[a.place] == -1 || at[a.place] == a.into) << count;
      if (at[a.place + 1] != -1) {
        EXPECT_EQ(at[a.place + 1], a.from) << count;
      }
      at[a.place] = a.into;
      at[a.place + 1] = -1;
    }
  }
}

TEST(SumTreeTest, PowersOfTwoAreOneNodeAPart) {
  for (int64_t parts : {1, 2, 4, 8}) {
    for (int64_t count = parts; count <= 64; count *= 2) {
      EXPECT_EQ(SumTree(count, parts).most_nodes(), 1) << count << " in " << parts;
    }
  }
  EXPECT_EQ(SumTree(12, 1).most_nodes(), 1);
  EXPECT_EQ(SumTree(12, 3).most_nodes(), 1);
  EXPECT_EQ(SumTree(12, 4).most_nodes(), 2);
}

TEST(SumTreeTest, APartHasFewNodes) {
  for (int64_t count = 1; count < 200; ++count) {
    for (int64_t parts = 1; parts <= count; ++parts) {
      const int64_t n = (count + parts - 1) / parts;
      int64_t bits = 0;  // log2(n), rounded up
      while (int64_t{1} << bits < n) ++bits;
      EXPECT_LE(SumTree(count, parts).most_nodes(), std::max<int64_t>(1, 2 * bits))
          << count << " in " << parts;
    }
  }
}

TEST(SumTreeTest, MorePartsThanNumbersAreRefused) {
  EXPECT_NE(error_of([] { SumTree(3, 4); }).find("from 1 to 3 parts"), std::string::npos);
  EXPECT_NE(error_of([] { SumTree(3, 0); }).find("got 0"), std::string::npos);
}

}  // namespace
}  // namespace zero
