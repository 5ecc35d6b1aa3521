// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptimizer::recover() in jobs of processes, of which some are killed or stopped. Survivors go
// on from a protected step, and end with the bits of a job that changed its number of ranks at that
// step through a checkpoint.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <iterator>
#include <map>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/files.h"
#include "tests/support/free_port.h"
#include "tests/support/run_program.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

constexpr int kSteps = 12;
constexpr int kTimeout = 20000;

std::string program() { return path_in("RECOVERY_PROGRAM", "tests/recovery/recovery_program"); }

std::string fresh(const std::string& name) {
  const std::string folder = ::testing::TempDir() + "recovery-" + name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

struct Job {
  int ranks = 3;
  int stage = 2;
  std::string inner = "adamw";
  int from = 0;
  int to = kSteps;
  std::string folder = {};
  std::vector<std::string> deaths = {};
  int timeout = kTimeout;
  int replacements = 0;
  bool late = false;  // replacements join when fewer ranks have made a step
  int ranks_per_machine = 0;
};

ProgramEnd run(const Job& job) {
  std::string command = "timeout 120 " + program() + " " + std::to_string(job.ranks) + " " +
                        std::to_string(job.stage) + " " + job.inner + " " +
                        std::to_string(job.from) + " " + std::to_string(job.to) + " " + job.folder +
                        " " + std::to_string(job.timeout);
  if (job.ranks > job.ranks_per_machine && job.ranks_per_machine > 0)
    command += " /" + std::to_string(job.ranks_per_machine);
  if (job.replacements > 0)
    command += " +" + std::to_string(job.replacements) + (job.late ? "late" : "");
  for (const std::string& death : job.deaths) command += " " + death;
  return run_program(command);
}

// A step from which another group went on.
struct Change {
  int step = 0;
  int ranks = 0;
  friend auto operator<=>(const Change&, const Change&) = default;
};

// What the ranks say, the same from each of them, in the order of recoveries. When a rank dies
// within a recovery, some of the others may have completed it and others not.
std::vector<Change> changes_in(const std::string& output, bool died_within = false) {
  static const std::regex line(
      "/recovery (\\d+)[^\n]* at step (\\d+) from step (\\d+) as rank \\d+ of (\\d+) in");
  std::map<std::pair<int, Change>, int> said;
  for (auto m = std::sregex_iterator(output.begin(), output.end(), line);
       m != std::sregex_iterator(); ++m) {
    const Change change{std::stoi((*m)[2]), std::stoi((*m)[4])};
    // The protected step before the last one counts if a rank dies while the last is sent.
    EXPECT_LE(std::stoi((*m)[3]) - change.step, 2 * 3) << output;
    ++said[{std::stoi((*m)[1]), change}];
  }
  std::vector<Change> changes;
  std::set<int> numbers;
  for (const auto& [key, count] : said) {
    EXPECT_TRUE(numbers.insert(key.first).second) << "each rank says the same\n" << output;
    if (died_within && changes.size() + 1 < said.size()) {
      EXPECT_LE(count, key.second.ranks) << output;
    } else {
      EXPECT_EQ(count, key.second.ranks) << "each rank says the same\n" << output;
    }
    changes.push_back(key.second);
  }
  return changes;
}

// Steps [from, to) as recovery_program makes them without deaths, with ranks that are threads. What
// it writes at their end is in `folder`.
void train(const Job& job) {
  Training training;
  training.inner = job.inner == "sgd" ? Inner::kSgdMomentum : Inner::kAdamW;
  training.max_norm = 0.7;
  training.options.stage(job.stage).bucket_bytes(900);
  RunOptions options;
  if (job.ranks > job.ranks_per_machine) options.ranks_per_machine = job.ranks_per_machine;
  run_ranks(
      job.ranks,
      [&](const Group& group) {
        CheckpointRun run(training, group, 1 + job.from + group.rank() * job.from);
        const std::string step = "/step-";
        if (job.from > 0)
          run.optimizer->load_checkpoint(job.folder + step + std::to_string(job.from));
        run.train(job.from, job.to);
        run.optimizer->save_checkpoint(job.folder + step + std::to_string(job.to));
        const Snapshot snapshot = run.snapshot();
        if (group.rank() == 0) {
          write_snapshot(snapshot, job.folder + "/state-" + std::to_string(job.to));
        }
      },
      options);
}

// The final state of a job without deaths that has the same ranks from the same steps on, each part
// with models of its own. Both stages have the same bits.
const std::string& reference(int ranks, const std::string& inner,
                             const std::vector<Change>& changes, int steps = kSteps,
                             int ranks_per_machine = 0) {
  using Key = std::tuple<int, std::string, std::vector<Change>, int, int>;
  static std::map<Key, std::string> known;
  std::string& state = known[{ranks, inner, changes, steps, ranks_per_machine}];
  if (!state.empty()) return state;
  Job job{.ranks = ranks,
          .inner = inner,
          .folder = fresh("reference"),
          .ranks_per_machine = ranks_per_machine};
  for (size_t i = 0; i <= changes.size(); ++i) {
    job.to = i < changes.size() ? changes[i].step : steps;
    if (job.to > job.from) train(job);
    job.from = job.to;
    if (i < changes.size()) job.ranks = changes[i].ranks;
  }
  state = content(job.folder + "/state-" + std::to_string(steps));
  EXPECT_FALSE(state.empty());
  return state;
}

// The job ended with step `steps`, after these changes.
void expect_bits_of_reference(const Job& job, const std::vector<Change>& changes,
                              int steps = kSteps) {
  EXPECT_TRUE(content(job.folder + "/state-" + std::to_string(steps)) ==
              reference(job.ranks, job.inner, changes, steps, job.ranks_per_machine))
      << "other bits than without deaths";
}

// What a job says of its last step.
int steps_in(const std::string& output) {
  const size_t done = output.find("done after step ");
  EXPECT_NE(done, std::string::npos);
  return done == std::string::npos ? 0 : std::atoi(output.c_str() + done + 16);
}

// With what error a rank of a job has ended.
std::string ending_of(int rank, const std::string& output) {
  const size_t at = output.find("rank " + std::to_string(rank) + " ended: ");
  EXPECT_NE(at, std::string::npos) << output;
  return at == std::string::npos ? "" : output.substr(at, output.find('\n', at) - at);
}

// A job whose deaths leave so many ranks one after the other.
struct Recovery {
  Job job;
  std::vector<int> left;
};

void check(const Recovery& recovery, const ProgramEnd& outcome) {
  const Job& job = recovery.job;
  std::string name = std::to_string(job.ranks) + " ranks, " + job.inner;
  for (const std::string& death : job.deaths) name += ", " + death;
  SCOPED_TRACE(name + ", stage " + std::to_string(job.stage) + "\n" + outcome.output);
  ASSERT_EQ(outcome.exit_status, 0);
  const std::vector<Change> changes = changes_in(outcome.output);
  std::vector<int> ranks;
  for (const Change& change : changes) ranks.push_back(change.ranks);
  ASSERT_EQ(ranks, recovery.left);
  if (ranks == std::vector<int>{2} && job.ranks_per_machine == 0) {
    // Each of the two maps the memory of the other and none of the dead: that would keep all that
    // they have shared, 192 MB for a model of 160 MB.
    static const std::regex mapped("has mapped the memory of 1 others");
    const std::string& text = outcome.output;
    EXPECT_EQ(std::distance(std::sregex_iterator(text.begin(), text.end(), mapped), {}), 2);
  }
  expect_bits_of_reference(job, changes);
}

// Three at any time, since much of it is waiting.
std::vector<ProgramEnd> run_all(const std::vector<Job>& jobs) {
  std::vector<ProgramEnd> outcomes(jobs.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < jobs.size(); i = next++) outcomes[i] = run(jobs[i]);
  };
  std::vector<std::future<void>> workers;
  for (int i = 0; i < 3; ++i) workers.push_back(std::async(std::launch::async, work));
  for (std::future<void>& worker : workers) worker.get();
  return outcomes;
}

// Runs the jobs and compares their bits.
void expect_recoveries(std::vector<Recovery> recoveries) {
  std::vector<Job> jobs;
  for (Recovery& recovery : recoveries) {
    recovery.job.folder = fresh("job-" + std::to_string(jobs.size()));
    jobs.push_back(recovery.job);
  }
  const std::vector<ProgramEnd> outcomes = run_all(jobs);
  for (size_t i = 0; i < jobs.size(); ++i) check(recoveries[i], outcomes[i]);
}

std::vector<std::string> death_of(int rank, const std::string& where) {
  return {std::to_string(rank) + "@" + where};
}

// Stages and optimizers take turns; the long test has all. Of four ranks, each is killed in
// OneAfterTheOther or TwoAtOnceWhoseCopiesAreElsewhere. Nothing keeps the memory of the dead.
TEST(RecoveryTest, AnyRankMayBeKilled) {
  std::vector<Recovery> recoveries;
  for (const int ranks : {2, 3}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const int turn = ranks + rank;
      recoveries.push_back({{.ranks = ranks,
                             .stage = 1 + turn % 2,
                             .inner = turn / 2 % 2 == 0 ? "sgd" : "adamw",
                             .deaths = death_of(rank, rank % 2 == 0 ? "5b" : "5k")},
                            {ranks - 1}});
    }
  }
  expect_recoveries(std::move(recoveries));
}

TEST(RecoveryTest, KilledBeforeAnyStepWasMade) {
  expect_recoveries({{{.ranks = 3, .deaths = {"0@0k"}}, {2}}});
}

TEST(RecoveryTest, OneAfterTheOther) {
  expect_recoveries(
      {{{.ranks = 4, .inner = "sgd", .deaths = {"0@4k", "2@8b", "3@10k"}}, {3, 2, 1}}});
}

// Of four ranks, each keeps the copy of the one before it.
TEST(RecoveryTest, TwoAtOnceWhoseCopiesAreElsewhere) {
  expect_recoveries({{{.ranks = 4, .deaths = {"1@5k", "3@5r"}}, {2}}});
}

// A wait for it would outlast the test.
constexpr int kTenMinutes = 600000;

// How many messages `rank` sends in the recoveries of a job, by what the job says.
int messages_in(const std::string& output, int rank) {
  const std::regex line("rank " + std::to_string(rank) + " world/recovery[^\n]* (\\d+) messages");
  int messages = 0;
  for (auto m = std::sregex_iterator(output.begin(), output.end(), line);
       m != std::sregex_iterator(); ++m) {
    messages = std::stoi((*m)[1]);
  }
  EXPECT_GT(messages, 10) << output;
  return messages;
}

// A second rank dies before the n-th message of its recoveries, or of joining, or it is stopped
// there for longer than an answer to the roll call may take.
struct SecondDeath {
  Job job;
  int rank = 0;
  // Of messages from the first to the last, or the middle one. The long test takes each fourth.
  int count = 1;
  bool recovers = true;  // false: its shard or that of the first may be lost with its copy
  bool pauses = false;
};

void check_second(const Job& job, bool recovers, bool pauses, const ProgramEnd& outcome) {
  SCOPED_TRACE(job.deaths[0] + " " + job.deaths[1] + ", " + std::to_string(job.ranks) + " ranks\n" +
               outcome.output);
  ASSERT_NE(outcome.exit_status, 124) << "it waits";
  static const std::regex ended("rank (\\d+) ended: ([^\n]*)");
  for (auto m = std::sregex_iterator(outcome.output.begin(), outcome.output.end(), ended);
       m != std::sregex_iterator(); ++m) {
    const std::string text = (*m)[2];
    const bool is_lost = text.find("the shard of rank ") != std::string::npos &&
                         text.find(" is lost: ") != std::string::npos;
    // A process that joins begins with those that have not died yet.
    const bool joined = std::stoi((*m)[1]) >= job.ranks;
    const bool is_left = text.find("the other ranks went on without rank ") != std::string::npos;
    EXPECT_TRUE((is_lost && !recovers) || (is_left && pauses) ||
                (joined && (text.find("ended") != std::string::npos ||
                            text.find("lost rank ") != std::string::npos)))
        << text;
  }
  if (outcome.exit_status != 0) {
    EXPECT_FALSE(recovers);
    return;
  }
  const std::vector<Change> changes = changes_in(outcome.output, /*died_within=*/true);
  ASSERT_FALSE(changes.empty());
  expect_bits_of_reference(job, changes, steps_in(outcome.output));
}

// What jobs of as many ranks say that have no second death.
std::vector<std::string> without_second_deaths(const std::vector<SecondDeath>& deaths) {
  const auto key_of = [](const Job& job) { return std::pair(job.ranks, job.replacements); };
  std::map<std::pair<int, int>, size_t> places;
  std::vector<Job> jobs;
  for (const SecondDeath& death : deaths) {
    if (!places.try_emplace(key_of(death.job), jobs.size()).second) continue;
    jobs.push_back(death.job);
    jobs.back().folder = fresh("first-" + std::to_string(jobs.size()));
    jobs.back().timeout = kTenMinutes;
  }
  const std::vector<ProgramEnd> outcomes = run_all(jobs);
  for (const ProgramEnd& outcome : outcomes) EXPECT_EQ(outcome.exit_status, 0) << outcome.output;
  std::vector<std::string> result;
  for (const SecondDeath& death : deaths) {
    result.push_back(outcomes[places[key_of(death.job)]].output);
  }
  return result;
}

// The messages of `count` in all before which a second death is tried.
std::vector<int> strikes(const SecondDeath& death, int count) {
  std::vector<int> messages;
  if (std::getenv("ZERO_RECOVERIES") != nullptr) {
    constexpr int kStride = 4;  // others each time: a failure names its message
    const int first = 1 + static_cast<int>(std::random_device{}() % kStride);
    for (int message = first; message <= count; message += kStride) messages.push_back(message);
  } else {
    const int wanted = std::min(death.count, count);
    for (int i = 0; i < wanted; ++i)
      messages.push_back(wanted == 1 ? count / 2 : 1 + i * (count - 1) / (wanted - 1));
  }
  return messages;
}

void expect_second_deaths(const std::vector<SecondDeath>& deaths) {
  const std::vector<std::string> outputs = without_second_deaths(deaths);
  std::vector<Job> jobs;
  std::vector<SecondDeath> death_of_job;
  for (size_t d = 0; d < deaths.size(); ++d) {
    const SecondDeath& death = deaths[d];
    for (const int message : strikes(death, messages_in(outputs[d], death.rank))) {
      jobs.push_back(death.job);
      jobs.back().folder = fresh("second-" + std::to_string(jobs.size()));
      jobs.back().timeout = kTenMinutes;
      jobs.back().deaths.push_back(std::to_string(death.rank) + "@" + std::to_string(message) +
                                   (death.pauses ? "p" : "m"));
      death_of_job.push_back(death);
    }
  }
  const std::vector<ProgramEnd> outcomes = run_all(jobs);
  for (size_t i = 0; i < jobs.size(); ++i) {
    check_second(jobs[i], death_of_job[i].recovers, death_of_job[i].pauses, outcomes[i]);
  }
}

TEST(RecoveryTest, ADeathDuringARecoveryIsOneMoreRecovery) {
  expect_second_deaths({{.job = {.ranks = 4, .deaths = {"1@5k"}}, .rank = 3, .count = 3},
                        {.job = {.ranks = 4, .stage = 1, .inner = "sgd", .deaths = {"2@5b"}}}});
}

// After a pause, two ranks cannot restore a step without the third, and three can without the
// fourth, which then learns that they went on.
TEST(RecoveryTest, ADeathAtAMessageOfARecoveryMayLoseAShardAndAPauseEndsNoJob) {
  const Job three{.ranks = 3, .deaths = {"1@5k"}}, four{.ranks = 4, .deaths = {"1@5k"}};
  expect_second_deaths({{.job = three, .recovers = false},
                        {.job = three, .rank = 2, .recovers = false},
                        {.job = four, .rank = 2, .count = 2, .recovers = false},
                        {.job = three, .pauses = true},
                        {.job = three, .rank = 2, .pauses = true},
                        {.job = four, .rank = 3, .count = 2, .pauses = true}});
}

TEST(RecoveryTest, ADeathOrAPauseAtAMessageOfJoining) {
  // The process that joins with the second rank that dies may end with it.
  const Job job{.ranks = 3, .deaths = {"1@5k"}, .replacements = 3};
  expect_second_deaths({{.job = job, .rank = 3, .count = 2},
                        {.job = job, .recovers = false},
                        {.job = job, .rank = 2, .recovers = false},
                        {.job = job, .rank = 3, .pauses = true},
                        {.job = job, .rank = 0, .pauses = true}});
}

// A copy is on the other machine; with neighbours for copies, one of these shards would be lost.
TEST(RecoveryTest, AWholeMachineMayBeLost) {
  expect_recoveries({{{.ranks = 4, .deaths = {"0@5k", "1@5k"}, .ranks_per_machine = 2}, {2}}});
}

// Those that join make the steps of full groups with the bits of a job that had so many ranks.
TEST(RecoveryTest, ProcessesThatJoinTakeTheirPart) {
  std::vector<Job> jobs = {
      {.ranks = 3, .deaths = {"1@5k"}, .replacements = 1, .late = true},
      {.ranks = 2, .stage = 1, .inner = "sgd", .deaths = {"0@4b"}, .replacements = 1, .late = true},
      {.ranks = 4, .deaths = {"0@4k", "3@7b"}, .replacements = 2},
      {.ranks = 3, .stage = 1, .deaths = {"0@4k", "3@0j"}, .replacements = 2},
  };
  std::vector<std::future<ProgramEnd>> outcomes;
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].folder = fresh("join-" + std::to_string(i));
    outcomes.push_back(std::async(std::launch::async, run, jobs[i]));
  }
  for (size_t i = 0; i < jobs.size(); ++i) {
    const Job& job = jobs[i];
    const ProgramEnd outcome = outcomes[i].get();
    SCOPED_TRACE(outcome.output);
    ASSERT_EQ(outcome.exit_status, 0);
    const bool died_within = job.deaths.back().ends_with('j');
    const std::vector<Change> changes = changes_in(outcome.output, died_within);
    ASSERT_FALSE(changes.empty());
    // One that is late joins steps that the others make, and the rest the recovery from the death.
    if (job.late) {
      EXPECT_EQ(changes.front().ranks, job.ranks - 1);
    }
    EXPECT_EQ(changes.back().ranks, job.ranks);
    expect_bits_of_reference(job, changes, steps_in(outcome.output));
  }
}

TEST(RecoveryTest, AShardThatIsLostWithItsCopyIsAnErrorThatNamesTheCheckpoint) {
  Job job{.ranks = 4, .to = 2, .folder = fresh("lost")};
  train(job);
  job.from = 2;
  job.to = kSteps;
  job.deaths = {"1@6k", "2@6r"};
  const ProgramEnd outcome = run(job);
  EXPECT_NE(outcome.exit_status, 0);
  for (const int rank : {0, 3}) {
    expect_words(ending_of(rank, outcome.output), {"recover(): ", "the shard of rank 1", "is lost",
                                                   "its copy", "the newest is", "step-2"});
  }
}

TEST(RecoveryTest, AStoppedRankFindsThatTheOthersWentOn) {
  std::map<int, Job> jobs;
  std::map<int, std::future<ProgramEnd>> outcomes;
  for (const int rank : {0, 2}) {
    Job job{.ranks = 3, .deaths = death_of(rank, "5s"), .timeout = 3000};
    job.folder = fresh("stopped-" + std::to_string(rank));
    outcomes[rank] = std::async(std::launch::async, run, job);
    jobs[rank] = job;
  }
  for (const auto& [rank, job] : jobs) {
    const ProgramEnd outcome = outcomes[rank].get();
    EXPECT_EQ(outcome.exit_status, 0) << outcome.output;
    expect_words(ending_of(rank, outcome.output),
                 {"the other ranks went on without rank " + std::to_string(rank), "as 2 ranks",
                  "end this process"});
    const std::vector<Change> changes = changes_in(outcome.output);
    ASSERT_EQ(changes.size(), 1U) << outcome.output;
    expect_bits_of_reference(job, changes);
  }
}

// Without launch_local(), rank 0 serves the store.
TEST(RecoveryTest, AStoreThatEndsWithItsRankIsAnError) {
  const std::string folder = fresh("store");
  const std::string variables =
      "LOCAL_RANK=$r WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=" +
      std::to_string(free_port());
  const std::string command = "{ for r in 0 1 2; do RANK=$r " + variables + " timeout 60 " +
                              program() + " 3 2 adamw 0 12 " + folder +
                              " 5000 0@7k & done; wait; }";
  const std::string output = run_program(command).output;
  for (const int rank : {1, 2}) {
    expect_words(ending_of(rank, output), {"recover(): the store of rank 0", "is gone"});
  }
}

// With --test_env=ZERO_RECOVERIES or as recovery_long_test: every combination, so many times.
TEST(RecoveryTest, EveryCombination) {
  const char* count = std::getenv("ZERO_RECOVERIES");
  if (count == nullptr) GTEST_SKIP() << "ZERO_RECOVERIES is not set";
  std::vector<Recovery> recoveries;
  for (int i = 0; i < std::atoi(count); ++i) {
    for (const int ranks : {2, 3, 4}) {
      for (const int stage : {1, 2}) {
        for (const std::string inner : {"sgd", "adamw"}) {
          for (int rank = 0; rank < ranks; ++rank) {
            // Also at steps that are protected, so that their copies are under way.
            const std::string where = std::to_string(3 + (i + rank + stage) % 7);
            recoveries.push_back({{.ranks = ranks,
                                   .stage = stage,
                                   .inner = inner,
                                   .deaths = death_of(rank, where + (i % 2 == 0 ? "b" : "k"))},
                                  {ranks - 1}});
          }
        }
      }
    }
  }
  expect_recoveries(std::move(recoveries));
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 2); }
