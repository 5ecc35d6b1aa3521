// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A program ends within seconds wherever its ranks leave it, all together or one alone: whatever
// large message is on its way then, no rank waits for its timeout.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "tests/support/cases_at_once.h"
#include "tests/support/run_program.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

// The group's timeout is two minutes.
constexpr std::chrono::seconds kSoon{60};

void expect_end(const std::string& ending, int world_size, const std::string& transport) {
  const std::string command = "exec tests/training/endings_program '" + ending + "' " +
                              std::to_string(world_size) + " " + transport;
  SCOPED_TRACE(command);
  const auto begin = Clock::now();
  const auto [exit_status, output] = run_program(command);
  EXPECT_LT(Clock::now() - begin, kSoon) << output;
  const bool all_leave = ending.starts_with("all ");
  EXPECT_EQ(exit_status == 0, all_leave) << output;
  // The launcher kills, ten seconds after the first has ended, those that have not said why.
  for (int rank = 1; rank < world_size && !all_leave; ++rank) {
    EXPECT_NE(output.find("rank " + std::to_string(rank) + ": "), std::string::npos) << output;
  }
}

class EndingsTest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Ways, EndingsTest,
                         testing::Values("all return after backward", "all return after step",
                                         "all return in a save", "throws before backward",
                                         "killed in backward", "throws after backward",
                                         "throws after step", "returns after step",
                                         "throws in a save"));

// A rank that leaves alone has two others, who also wait for each other.
TEST_P(EndingsTest, NoRankWaitsForATimeout) {
  expect_end(GetParam(), std::string(GetParam()).starts_with("all ") ? 2 : 3, "");
}

TEST(SharedMemoryEndingsTest, NoRankWaitsForATimeout) {
  expect_end("throws after backward", 2, "plain");
  expect_end("all return in a save", 2, "plain");
}

// With a rule that it asks, of which the library keeps a list.
TEST(EndingsOfTheProcessTest, AnOptimizerAtNamespaceScopeMayEndWithIt) {
  expect_end("all leave it to the process", 1, "plain");
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
