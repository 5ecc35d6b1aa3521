// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A rank that is killed while a large row of it arrives over a socket is missed long before the
// timeout, though Gloo does not end the wait for a row of which a part has arrived.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/error_of.h"

namespace zero {
namespace {

TEST(LostRankTest, AKilledRankIsMissedInTheMiddleOfARow) {
  for (const int life : {200, 330, 460}) {
    const std::string command =
        "exec tests/comm/transfer_program " + std::to_string(life) + " 2>&1";
    FILE* pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string output;
    std::array<char, 4096> buffer;
    while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe)) {
      output.append(buffer.data(), count);
    }
    const int status = pclose(pipe);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 128 + SIGKILL) << output;
    expect_words(output, {"survivor after ", "exchange_rows of rows: lost rank 1"});
    const size_t at = output.find("survivor after ");
    ASSERT_NE(at, std::string::npos);
    // The group's timeout is 30 s.
    EXPECT_LT(std::atoi(output.c_str() + at + 15), 10000) << output;
  }
}

}  // namespace
}  // namespace zero
