// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A killed rank is missed long before the timeout: over sockets, though Gloo does not end the wait
// for a row of which a part has arrived, and in shared memory, where nothing says that it has
// ended.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <future>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_program.h"

namespace zero {
namespace {

// Returns the milliseconds after which the survivor misses the other, of a timeout of 30 s.
int missed_after(const std::string& rows, int life) {
  const auto [exit_status, output] =
      run_program("exec tests/comm/transfer_program " + rows + " " + std::to_string(life));
  EXPECT_EQ(exit_status, 128 + SIGKILL) << output;
  // It may be killed between two rows: then the next one cannot start.
  expect_words(output, {"survivor after ", "exchange_rows of rows: ", "lost rank 1"});
  const size_t at = output.find("survivor after ");
  return at == std::string::npos ? 0 : std::atoi(output.c_str() + at + 15);
}

// All at once: much of it is waiting.
void expect_missed_within(int limit, const std::string& rows, const std::vector<int>& lives) {
  std::vector<std::future<int>> all;
  for (const int life : lives) {
    all.push_back(std::async(std::launch::async, missed_after, rows, life));
  }
  for (std::future<int>& one : all) EXPECT_LT(one.get(), limit);
}

TEST(LostRankTest, AKilledRankIsMissedInTheMiddleOfARow) {
  expect_missed_within(10000, "sockets", {200, 330, 460});
}

TEST(LostRankTest, AKilledRankIsMissedWhereRowsAreInSharedMemory) {
  expect_missed_within(5000, "shared", {330});
}

}  // namespace
}  // namespace zero
