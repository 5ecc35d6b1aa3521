// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The file descriptors of ranks: programs that a rank starts inherit none, and too few of them are
// an error that says so.

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/run_program.h"

namespace zero {
namespace {

struct Outcome {
  int code = -1;
  std::string output;
  std::chrono::steady_clock::duration duration{};
  // What follows `start` in its line; fails where there is no such line.
  std::string after(const std::string& start) const {
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind(start, 0) == 0) return line.substr(start.size());
    }
    ADD_FAILURE() << "no line \"" << start << "\" in: " << output;
    return {};
  }
};

Outcome run(const std::string& arguments, const std::string& before = "") {
  const auto start = std::chrono::steady_clock::now();
  const auto [code, output] =
      run_program(before + "exec tests/rendezvous/descriptor_program " + arguments);
  return {code, output, std::chrono::steady_clock::now() - start};
}

std::string rank_text(int rank) { return "rank " + std::to_string(rank) + " "; }

TEST(Descriptors, ProgramsThatARankStartsInheritNone) {
  for (const char* libuv : {"1", "0"}) {
    setenv("USE_LIBUV", libuv, 1);
    for (const int ranks : libuv == std::string("1") ? std::vector{1, 2, 3} : std::vector{3}) {
      const Outcome outcome = run(std::to_string(ranks) + " list");
      EXPECT_EQ(outcome.code, 0) << outcome.output;
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(outcome.after(rank_text(rank) + "lets inherit:"), "") << ranks << " ranks";
        const std::string has = outcome.after(rank_text(rank) + "has:");
        EXPECT_EQ(has.find("socket:") != std::string::npos, ranks > 1) << has;
      }
    }
    unsetenv("USE_LIBUV");
  }
}

TEST(Descriptors, AProgramThatOutlivesItsRankDoesNotHideItsDeath) {
  for (const int ranks : {2, 3}) {
    const Outcome outcome = run(std::to_string(ranks) + " child");
    const std::string last = rank_text(ranks - 1);
    const int child = std::atoi(outcome.after(last + "started ").c_str());
    ASSERT_GT(child, 0);
    EXPECT_EQ(kill(child, SIGKILL), 0) << "it has ended before the test did";
    EXPECT_EQ(outcome.after(last + "gave it:"), "");
    for (int rank = 0; rank < ranks - 1; ++rank) {
      const std::string waited = outcome.after(rank_text(rank) + "waited ");
      EXPECT_LT(std::atoi(waited.c_str()), 10000) << waited;  // of a timeout of 20 s
      expect_words(waited, {"lost rank"});
    }
  }
}

TEST(Descriptors, TooFewAreAnErrorOnAllRanks) {
  for (const int ranks : {2, 3}) {
    const Outcome outcome = run(std::to_string(ranks) + " few");
    EXPECT_EQ(outcome.code, 3) << outcome.output;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string waited = outcome.after(rank_text(rank) + "waited ");
      EXPECT_LT(std::atoi(waited.c_str()), 10000) << waited;  // of a timeout of 20 s
      expect_words(waited, {"ulimit -n", "too few file descriptors", "are needed", "are open"});
      if (rank < ranks - 1) expect_words(waited, {"rank " + std::to_string(ranks - 1) + ": too"});
    }
  }
}

TEST(Descriptors, ALaunchWithTooFewFailsAtOnce) {
  for (const char* arguments : {"2 list", "3 list prefix"}) {
    const Outcome outcome = run(arguments, "ulimit -n 14; ");
    EXPECT_EQ(outcome.code, 4) << outcome.output;
    expect_words(outcome.after("c10::Error: "), {"launch_local", "ulimit -n", "got 14"});
    EXPECT_LT(outcome.duration, std::chrono::seconds(60));  // c10d waits for 300 s
  }
}

TEST(Descriptors, ARankThatServesTheStoreWithTooFewFailsAtOnce) {
  const Outcome outcome =
      run("2 list",
          "export RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
          "MASTER_PORT=29517; ulimit -n 14; ");
  EXPECT_EQ(outcome.code, 1) << outcome.output;
  expect_words(outcome.after("error: init_process_group: "), {"cannot serve", "ulimit -n"});
  EXPECT_LT(outcome.duration, std::chrono::seconds(15));  // of a timeout of 20 s
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 2); }
