// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/group_order.h"

#include <map>

namespace zero {

std::vector<Group> agreed_order(const std::vector<Group>& groups) {
  std::map<GroupKey, Group> sorted;
  for (const Group& group : groups) {
    if (group.world_size() > 1) sorted.try_emplace(key_of(group), group);
  }
  std::vector<Group> result;
  for (const auto& item : sorted) result.push_back(item.second);
  return result;
}

}  // namespace zero
