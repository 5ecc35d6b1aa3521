// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The job that a store serves, and its restart rounds. Ranks of another job that was given the same
// MASTER_PORT find that store too, and must not take part in its meetings.
//
// A launcher may start its job again over one store, as torchrun's agents do: each agent serves all
// rounds by that store, and counts only the restarts that it has made itself. So no number of
// theirs tells rounds apart. Here the process of rank 0 begins a round, and the others find it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/environment.h"

namespace zero {

// For who serves the store, before any rank comes, and for rank 0 where it begins a round: makes
// the store that of a job. `store` is that of a round.
void claim_for_job(BoundedStore& store, const std::string& job, int world_size);

// Throws c10::ValueError when `store` serves a job with another identifier or another number of
// ranks than `env` says. Of a process that joins a job only the identifier counts, if it has one.
// Rank 0 claims a store that it serves: the others are compared with it, and leave the store as it
// is.
void check_job(BoundedStore& store, const Environment& env, const std::string& name_of_store);

// Whether `store`, the whole one, may serve several rounds. The store of a rank serves one, since
// it ends with that rank, and so does that of a launcher which has claimed it for a job.
bool has_restart_rounds(BoundedStore& store, const Environment& env);

// The keys of a round; 0 where there are none.
std::string prefix_of_restart_round(int64_t round);

// Returns the number of the round that this process takes part in, from 1 on and above `after`.
// Rank 0 begins one, and calls off the first meeting of the one before. Another rank waits until
// `deadline` for one of its WORLD_SIZE in which no other process has its number: others are over.
// `own` is a text that no other process has.
int64_t enter_restart_round(const BoundedStore& store, const Environment& env,
                            const std::string& own, int64_t after,
                            std::chrono::steady_clock::time_point deadline);

// Whether rank 0 has begun another round since. Never throws: a store that is gone does not know.
bool is_over(BoundedStore& store, int64_t round) noexcept;

}  // namespace zero
