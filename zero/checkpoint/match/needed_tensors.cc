// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/match/needed_tensors.h"

#include <algorithm>
#include <iterator>

namespace zero {

void NeededTensors::add(const HeldRange& range) {
  std::map<std::string, std::pair<int64_t, int64_t>> hulls;
  for (const WantedRange& stored : range.stored) {
    const int64_t end = stored.begin + stored.numel;
    int64_t& last = ranges_[stored.owner].by_begin[stored.begin];
    last = std::max(last, end);
    auto& hull = hulls.try_emplace(stored.owner, stored.begin, end).first->second;
    hull = {std::min(hull.first, stored.begin), std::max(hull.second, end)};
  }
  for (const auto& [owner, hull] : hulls) ranges_[owner].hulls.push_back(hull);
}

void NeededTensors::add_state(const std::string& owner, const std::string& kind) {
  states_.emplace(owner, kind);
}

bool NeededTensors::contains(const ManifestTensor& tensor) const {
  if (states_.count({tensor.owner, tensor.kind}) > 0) return true;
  const auto found = ranges_.find(tensor.owner);
  if (found == ranges_.end()) return false;
  if (is_uncut(tensor.kind)) return true;
  const Ranges& ranges = found->second;
  const int64_t begin = tensor.begin, end = tensor.begin + tensor.numel;
  if (is_value(tensor.kind)) {
    return std::any_of(ranges.hulls.begin(), ranges.hulls.end(),
                       [&](const auto& hull) { return begin < hull.second && hull.first < end; });
  }
  const auto after = ranges.by_begin.lower_bound(end);
  return after != ranges.by_begin.begin() && std::prev(after)->second > begin;
}

}  // namespace zero
