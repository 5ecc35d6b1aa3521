// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Puts groups into one order on all ranks. Making a communicator blocks for its ranks, so ranks
// that made those of overlapping groups in different orders would wait for each other in a circle;
// and partial sums that go through several groups are right only if all ranks take them in one
// order.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "zero/process_group.h"

namespace zero {

// Identifies a Group. Sorts by name first: groups of one role have one name on all ranks, as
// those of a Mesh do, while their ranks differ.
using GroupKey = std::pair<std::string, std::vector<int>>;

inline GroupKey key_of(const Group& group) { return {group.name(), group.global_ranks()}; }

// The different groups among `groups` that have more than one rank, by key.
std::vector<Group> agreed_order(const std::vector<Group>& groups);

}  // namespace zero
