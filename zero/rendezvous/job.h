// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The job that a store serves. Ranks of another job that was given the same MASTER_PORT find that
// store too, and must not take part in its meetings.
#pragma once

#include <string>

#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/environment.h"

namespace zero {

// For who serves the store, before any rank comes, and for rank 0 where it begins a round: makes
// the store that of a job. `store` is that of a round.
void claim_for_job(BoundedStore& store, const std::string& job, int world_size);
// Returns the number of ranks of the job that has claimed the store; 0 where none has.
int ranks_of_job(BoundedStore& store);

// Throws c10::ValueError when `store` serves a job with another identifier or another number of
// ranks than `env` says. Of a process that joins a job only the identifier counts, if it has one.
// Rank 0 claims a store that it serves: the others are compared with it, and leave the store as it
// is.
void check_job(BoundedStore& store, const Environment& env, const std::string& name_of_store);

}  // namespace zero
