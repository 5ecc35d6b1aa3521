// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The environment variables of libtorch that break promises over NCCL. Needs no GPU.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/support/error_of.h"
#include "zero/comm/backends/nccl.h"

namespace zero {
namespace {

using Variables = std::map<std::string, std::string>;

auto lookup_in(const Variables& variables) {
  return [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

std::string problem_of(const Variables& variables) {
  return nccl_environment_problem(lookup_in(variables));
}

TEST(NcclEnvironmentTest, ASwitchThatIsOnIsRefusedWithItsNameAndAReason) {
  for (const char* value : {"1", "y", "Yes", "T", "TRUE"}) {
    for (const char* name : {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}) {
      expect_words(problem_of({{name, value}}),
                   {std::string("expected ") + name + " to be off, got \"" + value + "\"",
                    "hold the host", "unset it"});
    }
    expect_words(problem_of({{"TORCH_NCCL_NAN_CHECK", value}}),
                 {std::string("expected TORCH_NCCL_NAN_CHECK to be off, got \"") + value + "\"",
                  "a step is skipped", "unset it"});
  }
}

TEST(NcclEnvironmentTest, ASwitchThatIsOffIsNoProblem) {
  EXPECT_EQ(problem_of({}), "");
  for (const char* value : {"0", "n", "No", "F", "FALSE"}) {
    EXPECT_EQ(problem_of({{"TORCH_NCCL_BLOCKING_WAIT", value},
                          {"NCCL_BLOCKING_WAIT", value},
                          {"TORCH_NCCL_NAN_CHECK", value}}),
              "");
  }
  EXPECT_EQ(problem_of({{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"}, {"NCCL_DEBUG", "1"}}), "");
}

// As in libtorch.
TEST(NcclEnvironmentTest, TheNewNameCountsWhereBothAreSet) {
  EXPECT_EQ(problem_of({{"TORCH_NCCL_BLOCKING_WAIT", "0"}, {"NCCL_BLOCKING_WAIT", "1"}}), "");
  EXPECT_NE(problem_of({{"TORCH_NCCL_BLOCKING_WAIT", "1"}, {"NCCL_BLOCKING_WAIT", "0"}}), "");
}

// Of this process, whose tests set none.
TEST(NcclEnvironmentTest, TheEnvironmentOfTheProcessIsTheDefault) {
  EXPECT_EQ(nccl_environment_problem(), "");
  setenv("TORCH_NCCL_NAN_CHECK", "1", 1);
  EXPECT_NE(nccl_environment_problem(), "");
  unsetenv("TORCH_NCCL_NAN_CHECK");
}

// torchrun sets 1 for each rank whose user has set nothing. With 1 libtorch ends the process.
TEST(NcclEnvironmentTest, AOneOfTorchrunIsNoWishOfTheUsers) {
  const auto is_of_torchrun = [](const char* value, bool torchrun) {
    Variables variables{{"TORCH_NCCL_ASYNC_ERROR_HANDLING", value}};
    if (torchrun) variables["TORCHELASTIC_MAX_RESTARTS"] = "0";
    return torchrun_chose_error_handling(lookup_in(variables));
  };
  EXPECT_TRUE(is_of_torchrun("1", true));
  EXPECT_FALSE(is_of_torchrun("1", false));
  for (const char* value : {"0", "2", "3"}) EXPECT_FALSE(is_of_torchrun(value, true));
  EXPECT_FALSE(torchrun_chose_error_handling(lookup_in({})));
}

// Else libtorch's watchdog ends an operation before anyone knows which rank is missing.
TEST(NcclTimeoutTest, ControlMessagesEndBeforeOperationsOverNccl) {
  for (const auto timeout : {std::chrono::milliseconds(50), std::chrono::milliseconds(1800000)}) {
    EXPECT_GE(nccl_timeout(timeout), timeout + std::chrono::seconds(1));
  }
}

}  // namespace
}  // namespace zero
