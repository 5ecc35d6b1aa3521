// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Whatever happens to one process or its machine, before and while training, the others end within
// the timeout and a second, and their errors name that rank. Rank 0 serves the store, as with
// mpirun and srun, so that its silence is the store's too.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/run_program.h"
#include "tests/training/silence_rank.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kTimeout = 3000;
// The promise, and half a second for the other programs on these cores.
constexpr int kLimit = kTimeout + 1000 + 500;

std::string program() { return path_in("SILENCE_PROGRAM", "tests/training/silence_program"); }

// What happens to which of how many ranks.
struct Death {
  int world_size;
  int victim;
  std::string how;  // As silence_rank() takes it; "never" for a rank that is not started.
  std::string where;
  int seconds_late = 0;  // Of rank 0.
  std::string text() const {
    return "rank " + std::to_string(victim) + " of " + std::to_string(world_size) + ": " + how +
           " at " + where;
  }
};

struct Rank {
  pid_t pid = -1;
  int from = -1;
  std::string output;
  std::optional<Clock::time_point> failed;
  std::optional<Clock::time_point> ended;
};

// What it printed so far and now; nothing more at its end.
void take_output(Rank& rank) {
  std::array<char, 4096> buffer;
  const ssize_t count = read(rank.from, buffer.data(), buffer.size());
  if (count > 0) {
    rank.output.append(buffer.data(), static_cast<size_t>(count));
    if (!rank.failed && rank.output.find("failed in ") != std::string::npos) {
      rank.failed = Clock::now();
    }
    return;
  }
  close(rank.from);
  rank.from = -1;
  rank.ended = Clock::now();
}

// Without an exec, since libtorch is loaded here. It ends as a program does.
Rank start(int rank, const Death& death, uint16_t port) {
  std::array<int, 2> pipe{};
  EXPECT_EQ(pipe2(pipe.data(), O_CLOEXEC), 0);
  const std::pair<const char*, std::string> variables[] = {
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", std::to_string(death.world_size)},
      {"LOCAL_WORLD_SIZE", std::to_string(death.world_size)},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(port)}};
  Rank result;
  result.from = pipe[0];
  result.pid = fork();
  if (result.pid == 0) {
    dup2(pipe[1], STDOUT_FILENO);
    dup2(pipe[1], STDERR_FILENO);
    close_as_exec_does();
    for (const auto& [name, value] : variables) setenv(name, value.c_str(), /*overwrite=*/1);
    if (rank == 0) std::this_thread::sleep_for(std::chrono::seconds(death.seconds_late));
    std::exit(silence_rank(kTimeout, death.victim, death.how, death.where));
  }
  close(pipe[1]);
  return result;
}

// Runs the job until its survivors have ended, for at most a minute.
std::vector<Rank> run(const Death& death) {
  const uint16_t port = free_port();
  std::vector<Rank> ranks(death.world_size);
  for (int rank = 0; rank < death.world_size; ++rank) {
    if (rank != death.victim || death.how != "never") ranks[rank] = start(rank, death, port);
  }
  const auto end = Clock::now() + std::chrono::minutes(1);
  while (Clock::now() < end) {
    std::vector<pollfd> polled;
    for (const Rank& rank : ranks) {
      if (&rank != &ranks[death.victim] && rank.from >= 0) {
        polled.push_back({rank.from, POLLIN, 0});
      }
    }
    if (polled.empty()) break;
    poll(polled.data(), polled.size(), 100);
    for (const pollfd& ready : polled) {
      for (Rank& rank : ranks) {
        if (ready.revents != 0 && rank.from == ready.fd) take_output(rank);
      }
    }
  }
  for (Rank& rank : ranks) {
    if (rank.from >= 0) close(rank.from);
    if (rank.pid <= 0) continue;
    kill(rank.pid, SIGKILL);
    waitpid(rank.pid, nullptr, 0);
  }
  return ranks;
}

// The error in the output of one rank came in time and has these words.
void expect_error_in_time(const std::string& output, const std::vector<std::string>& words) {
  const size_t at = output.find("failed in ");
  ASSERT_NE(at, std::string::npos) << output;
  char what[32];
  int ms = 0;
  ASSERT_EQ(std::sscanf(output.c_str() + at, "failed in %31s after %d ms", what, &ms), 2) << output;
  EXPECT_LE(ms, kLimit) << output;
  expect_words(output.substr(at), words);
}

// All at once: what takes time is waiting.
void expect_named_in_time(const std::vector<Death>& deaths) {
  std::vector<std::future<std::vector<Rank>>> jobs;
  for (const Death& death : deaths) jobs.push_back(std::async(std::launch::async, run, death));
  for (size_t i = 0; i < deaths.size(); ++i) {
    const std::vector<Rank> ranks = jobs[i].get();
    for (int rank = 0; rank < deaths[i].world_size; ++rank) {
      if (rank == deaths[i].victim) continue;
      SCOPED_TRACE(deaths[i].text() + ", seen by rank " + std::to_string(rank));
      expect_error_in_time(ranks[rank].output, {"rank " + std::to_string(deaths[i].victim)});
      // What hangs in another thread does not keep the process.
      ASSERT_TRUE(ranks[rank].failed && ranks[rank].ended) << ranks[rank].output;
      EXPECT_LE(*ranks[rank].ended - *ranks[rank].failed, milliseconds(3000));
    }
  }
}

TEST(SilenceTest, NeverStarted) {
  expect_named_in_time({{2, 1, "never", "start"},
                        {2, 0, "never", "start"},
                        {3, 2, "never", "start", /*seconds_late=*/1}});
}

TEST(SilenceTest, StoppedOrKilledWhileItTrains) {
  expect_named_in_time(
      {{2, 0, "stop", "step:3"}, {2, 1, "stop", "step:3"}, {3, 0, "kill", "step:3"}});
}

TEST(SilenceTest, StoppedWhileItConnects) {
  expect_named_in_time(
      {{3, 2, "stop", "connect:3"}, {3, 2, "stop", "connect:5"}, {2, 0, "stop", "connect:5"}});
}

TEST(SilenceTest, KilledWhileItConnects) {
  expect_named_in_time(
      {{3, 2, "kill", "connect:3"}, {3, 2, "kill", "connect:5"}, {3, 0, "kill", "connect:5"}});
}

// Two network namespaces stand for two machines, and their link goes down.
TEST(SilenceTest, MachineThatIsOutOfReach) {
  const std::string script = path_in("SILENCE_MACHINES", "tests/training/silent_machine.sh");
  const auto [exit_status, output] =
      run_program("unshare --user --map-root-user --net sh " + script + " " + program() + " " +
                  std::to_string(kTimeout));
  // 1 and a text of unshare, or 77 of the script.
  if (exit_status == 77 || output.find("unshare: ") == 0) {
    GTEST_SKIP() << "network namespaces are not available here: " << output;
  }
  ASSERT_EQ(exit_status, 0) << output;
  const size_t second = output.find("---- rank 1");
  ASSERT_NE(second, std::string::npos) << output;
  expect_error_in_time(output.substr(0, second), {"rank 1"});
  expect_error_in_time(output.substr(second), {"rank 0"});
}

}  // namespace
}  // namespace zero
