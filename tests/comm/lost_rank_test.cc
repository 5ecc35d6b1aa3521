// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A rank that is killed while a large row of it arrives over a socket is missed long before the
// timeout, though Gloo does not end the wait for a row of which a part has arrived.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <string>

#include "tests/support/error_of.h"
#include "tests/support/run_program.h"

namespace zero {
namespace {

TEST(LostRankTest, AKilledRankIsMissedInTheMiddleOfARow) {
  for (const int life : {200, 330, 460}) {
    const auto [exit_status, output] =
        run_program("exec tests/comm/transfer_program " + std::to_string(life));
    EXPECT_EQ(exit_status, 128 + SIGKILL) << output;
    expect_words(output, {"survivor after ", "exchange_rows of rows: lost rank 1"});
    const size_t at = output.find("survivor after ");
    ASSERT_NE(at, std::string::npos);
    // The group's timeout is 30 s.
    EXPECT_LT(std::atoi(output.c_str() + at + 15), 10000) << output;
  }
}

}  // namespace
}  // namespace zero
