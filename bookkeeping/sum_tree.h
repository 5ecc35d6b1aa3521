// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The binary tree over which ZeroOptions::micro_batches adds gradients up, so that a sum does not
// depend on who computes which part of it.
//
//   numbers       0   1   2   3   4   5        count = 6
//                  \ /     \ /     \ /
//                  0,2     2,2     4,2
//                     \   /         |          4,4 has no numbers from 6 on: it is 4,2
//                      0,4         4,4
//                         \       /
//                            0,8
//
// Each part has a range of numbers. It adds up the subtrees that it has whole, its nodes; the sum
// of all numbers is made of the nodes of all parts.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace zero {

// The numbers [begin, begin + size) that are below the count of the tree, beyond which a node may
// reach. `size` is a power of two, and `begin` a multiple of it.
struct TreeNode {
  int64_t begin = 0;
  int64_t size = 1;
  bool operator==(const TreeNode&) const = default;
};

// An addition over the tree: value `into` becomes the sum of the values `into` and `from`.
struct TreeAddition {
  int64_t into = 0;
  int64_t from = 0;
  // The number of sums that are not complete meanwhile and are added to later: a place for `into`
  // that no other sum of that time has.
  int64_t place = 0;
};

class SumTree {
 public:
  // The tree on the numbers from 0 to count - 1, cut into `parts` ranges. Throws c10::Error unless
  // 1 <= parts <= count.
  SumTree(int64_t count, int64_t parts);

  int64_t count() const { return count_; }
  int64_t parts() const { return parts_; }
  // Part p has the numbers [begin(p), begin(p + 1)), which is at least one.
  int64_t begin(int64_t part) const { return count_ * part / parts_; }

  // The fewest nodes that have the numbers [begin, end), ascending: one for one number, and for n
  // numbers at most 2 log2(n), rounded up.
  std::vector<TreeNode> cover(int64_t begin, int64_t end) const;
  std::vector<TreeNode> nodes(int64_t part) const { return cover(begin(part), begin(part + 1)); }
  // The most nodes that a part has.
  int64_t most_nodes() const;

  // The additions that make one value of `nodes`, which are all numbers of a range, ascending:
  // value i is that of nodes[i]. What is left stands for cover() of the range. Value 0 is the sum
  // where that is one node.
  std::vector<TreeAddition> additions(const std::vector<TreeNode>& nodes) const;

  // Returns the largest node of the same numbers: a node at the end has a parent without sibling.
  TreeNode grown(TreeNode node) const;

 private:
  const int64_t count_;
  const int64_t parts_;
};

// Adds up values over a tree as they come: no value waits for another one unless it must.
template <typename Value>
class TreeStack {
 public:
  // `tree` must outlive it.
  explicit TreeStack(const SumTree& tree) : tree_(&tree) {}

  // The next node, which begins where the last one ended. Calls add(lower, upper) for each addition
  // that is possible now; `lower` becomes the sum.
  template <typename Add>
  void push(TreeNode node, Value value, const Add& add) {
    entries_.emplace_back(tree_->grown(node), std::move(value));
    while (entries_.size() > 1) {
      auto& [lower, sum] = entries_[entries_.size() - 2];
      const auto& [upper, other] = entries_.back();
      if (lower.size != upper.size || lower.begin % (2 * lower.size) != 0) break;
      add(sum, entries_.back().second);
      lower = tree_->grown({lower.begin, 2 * lower.size});
      entries_.pop_back();
    }
  }
  // The sums that wait for more, ascending, with their nodes.
  const std::vector<std::pair<TreeNode, Value>>& entries() const { return entries_; }
  std::vector<std::pair<TreeNode, Value>>& entries() { return entries_; }

 private:
  const SumTree* tree_;
  std::vector<std::pair<TreeNode, Value>> entries_;
};

}  // namespace zero
