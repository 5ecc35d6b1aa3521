// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/job.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>

#include "zero/base/error_text.h"
#include "zero/base/plain_text.h"
#include "zero/rendezvous/rendezvous.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPollInterval{50};
constexpr const char* kJob = "job";
constexpr const char* kRounds = "zero/rounds";  // how many were begun

// The number of ranks, a line feed and the identifier.
std::string job_text(const std::string& job, int world_size) {
  return plain_text(world_size, "\n", job);
}

std::string identifier_in(const std::string& text) { return text.substr(text.find('\n') + 1); }

// " of job ...", or nothing for a job without an identifier.
std::string of_job(const std::string& job) {
  return job.empty() ? std::string() : c10::str(" of job \"", job, "\"");
}

// Returns the number of ranks of the job that has claimed the store; 0 where none has.
int ranks_of_job(BoundedStore& store) {
  return store.check({kJob}) ? std::atoi(store.get_to_str(kJob).c_str()) : 0;
}

// Ranks of this round that came before it was begun may wait in the one before.
void call_off(const BoundedStore& store, int64_t round) {
  if (round > 0) Tries(store.under(prefix_of_restart_round(round) + "/0")).call_off();
}

// Why this rank cannot be in the round, or nothing.
std::string problem_of(BoundedStore& keys, const Environment& env, const std::string& own) {
  const int ranks = ranks_of_job(keys);
  if (ranks != env.world_size) return c10::str("the last one has ", ranks, " ranks");
  const std::string first = claim(keys, plain_text("came/", env.rank), own);
  if (first == own) return {};
  return c10::str("rank ", env.rank, " of the last one was ", first.substr(0, first.find('\n')));
}

}  // namespace

void claim_for_job(BoundedStore& store, const std::string& job, int world_size) {
  claim(store, kJob, job_text(job, world_size));
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

bool has_restart_rounds(BoundedStore& store, const Environment& env) {
  return env.agent_serves_store && !env.joins &&
         ranks_of_job(*store.under(prefix_of_restart_round(0))) == 0;
}

std::string prefix_of_restart_round(int64_t round) { return plain_text("zero/", round); }

int64_t enter_restart_round(const BoundedStore& store, const Environment& env,
                            const std::string& own, int64_t after, Clock::time_point deadline) {
  const auto all = store.within(
      std::max(std::chrono::ceil<milliseconds>(deadline - Clock::now()), kPollInterval));
  if (env.rank == 0) {
    const int64_t round = all->add(kRounds, 1);
    claim_for_job(*all->under(prefix_of_restart_round(round)), env.job, env.world_size);
    call_off(*all, round - 1);
    return round;
  }
  std::string problem = "there is none";
  for (;; std::this_thread::sleep_for(kPollInterval)) {
    const int64_t round = all->add(kRounds, 0);
    const auto keys = all->under(prefix_of_restart_round(round));
    if (round > after && ranks_of_job(*keys) > 0) {
      problem = problem_of(*keys, env, own);
      if (problem.empty()) return round;
      after = round;
    }
    if (Clock::now() >= deadline) {
      throw_communication_error(
          c10::str("waited for rank 0 to begin a round of ", env.world_size, " ranks: ", problem));
    }
  }
}

bool is_over(BoundedStore& store, int64_t round) noexcept {
  try {
    return store.add(kRounds, 0) > round;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace zero
