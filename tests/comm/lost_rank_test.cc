// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A killed rank is missed long before the timeout: over sockets, though Gloo does not end the wait
// for a row of which a part has arrived, and in shared memory, where nothing says that it has
// ended.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "tests/support/error_of.h"
#include "tests/support/run_program.h"

namespace zero {
namespace {

// Returns the milliseconds after which the survivor misses the other, of a timeout of 30 s.
int missed_after(const std::string& rows, int life) {
  const auto [exit_status, output] =
      run_program("exec tests/comm/transfer_program " + rows + " " + std::to_string(life));
  EXPECT_EQ(exit_status, 128 + SIGKILL) << output;
  expect_words(output, {"survivor after ", "exchange_rows of rows: lost rank 1"});
  const size_t at = output.find("survivor after ");
  return at == std::string::npos ? 0 : std::atoi(output.c_str() + at + 15);
}

TEST(LostRankTest, AKilledRankIsMissedInTheMiddleOfARow) {
  for (const int life : {200, 330, 460}) EXPECT_LT(missed_after("sockets", life), 10000);
}

TEST(LostRankTest, AKilledRankIsMissedWhereRowsAreInSharedMemory) {
  for (const int life : {200, 330, 460}) EXPECT_LT(missed_after("shared", life), 5000);
}

}  // namespace
}  // namespace zero
