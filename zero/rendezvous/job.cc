// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/job.h"

#include <c10/util/Exception.h>

#include <cstdlib>

#include "zero/rendezvous/rendezvous.h"

namespace zero {
namespace {

// The number of ranks, a line feed and the identifier.
std::string job_text(const std::string& job, int world_size) {
  return c10::str(world_size, "\n", job);
}

std::string identifier_in(const std::string& text) { return text.substr(text.find('\n') + 1); }

// " of job ...", or nothing for a job without an identifier.
std::string of_job(const std::string& job) {
  return job.empty() ? std::string() : c10::str(" of job \"", job, "\"");
}

constexpr const char* kJob = "job";

}  // namespace

void claim_for_job(BoundedStore& store, const std::string& job, int world_size) {
  claim(store, kJob, job_text(job, world_size));
}

int ranks_of_job(BoundedStore& store) {
  return store.check({kJob}) ? std::atoi(store.get_to_str(kJob).c_str()) : 0;
}

void check_job(BoundedStore& store, const Environment& env, const std::string& name_of_store) {
  const std::string own = job_text(env.job, env.world_size);
  const bool claims = !env.joins && env.rank == 0;
  const std::string held = claims ? claim(store, kJob, own) : store.get_to_str(kJob);
  if (held == own) return;
  const std::string job = identifier_in(held);
  if (env.joins && (env.job.empty() || env.job == job)) return;
  TORCH_CHECK_VALUE(false, "rank ", env.rank, " of ", env.world_size, of_job(env.job),
                    " has come to ", name_of_store, ", which serves ", std::atoi(held.c_str()),
                    " ranks", of_job(job),
                    "; give each job a MASTER_PORT of its own, and all ranks of a job the same "
                    "WORLD_SIZE and TORCHELASTIC_RUN_ID");
}

}  // namespace zero
