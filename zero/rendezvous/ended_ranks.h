// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The ranks of a job whose processes have ended, as the launcher that serves its store knows. So
// the others need not wait for them until a timeout. Other launchers say nothing.
#pragma once

#include <set>

#include "zero/rendezvous/bounded_store.h"

namespace zero {

// For the launcher. `rank` is the RANK of a process. Never throws.
void add_ended_rank(BoundedStore& store, int rank) noexcept;
// `store` may have any prefix.
std::set<int> ended_ranks(const BoundedStore& store);
// Returns whether all have ended that have a number below `rank`: a launcher numbers processes that
// join on from its ranks. False for 0.
bool all_below_have_ended(const BoundedStore& store, int rank);

}  // namespace zero
