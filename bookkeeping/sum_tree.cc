// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/sum_tree.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace zero {

SumTree::SumTree(int64_t count, int64_t parts) : count_(count), parts_(parts) {
  TORCH_CHECK(parts >= 1 && parts <= count, "SumTree: expected from 1 to ", count, " parts of ",
              count, " numbers, got ", parts);
}

TreeNode SumTree::grown(TreeNode node) const {
  const auto is_last = [&] { return node.begin + node.size >= count_ && node.size < count_; };
  while (is_last() && node.begin % (2 * node.size) == 0) node.size *= 2;
  return node;
}

std::vector<TreeNode> SumTree::cover(int64_t begin, int64_t end) const {
  std::vector<TreeNode> nodes;
  while (begin < end) {
    int64_t size = 1;
    const auto fits = [&](int64_t n) { return std::min(begin + n, count_) <= end; };
    while (size < count_ && begin % (2 * size) == 0 && fits(2 * size)) size *= 2;
    nodes.push_back({begin, size});
    begin += size;
  }
  return nodes;
}

int64_t SumTree::most_nodes() const {
  size_t most = 0;
  for (int64_t p = 0; p < parts_; ++p) most = std::max(most, nodes(p).size());
  return static_cast<int64_t>(most);
}

std::vector<TreeAddition> SumTree::additions(const std::vector<TreeNode>& nodes) const {
  std::vector<TreeAddition> result;
  TreeStack<int64_t> stack(*this);
  for (size_t i = 0; i < nodes.size(); ++i) {
    // Entries above `into` are those that this push has not added yet.
    auto above = static_cast<int64_t>(stack.entries().size());
    stack.push(nodes[i], static_cast<int64_t>(i), [&](int64_t into, int64_t from) {
      result.push_back({into, from, --above});
    });
  }
  return result;
}

}  // namespace zero
