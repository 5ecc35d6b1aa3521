// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// tests/support/cases_at_once.h: a case that fails, ends its process or is killed fails the test,
// and its output is there.
#include "tests/support/cases_at_once.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "tests/support/run_program.h"

namespace zero {
namespace {

// Cases that the others run.
TEST(Inner, DISABLED_Passes) { std::printf("in %s\n", std::getenv("TEST_TMPDIR")); }
TEST(Inner, DISABLED_PassesToo) { std::printf("in %s\n", std::getenv("TEST_TMPDIR")); }
TEST(Inner, DISABLED_Fails) { FAIL() << "on purpose"; }
TEST(Inner, DISABLED_Exits) { std::exit(0); }
TEST(Inner, DISABLED_IsKilled) { std::raise(SIGKILL); }

// Each runs until the other does.
void meet(const std::string& own, const std::string& other) {
  const std::filesystem::path folder = std::getenv("MEETING");
  std::ofstream(folder / own) << "here";
  for (int i = 0; i < 2000 && !std::filesystem::exists(folder / other); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_TRUE(std::filesystem::exists(folder / other));
}
TEST(Inner, DISABLED_Meets) { meet("one", "two"); }
TEST(Inner, DISABLED_MeetsToo) { meet("two", "one"); }

ProgramEnd run_inner(const std::string& filter, const std::string& before = "") {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  // Not those of this test.
  return run_program("unset XML_OUTPUT_FILE GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX; " + before +
                     "exec " + program + " --gtest_also_run_disabled_tests " +
                     "--gtest_filter='Inner.DISABLED_" + filter + "'");
}

TEST(CasesAtOnceTest, EachHasAFolderAndItsOutputIsThere) {
  const ProgramEnd end = run_inner("Passes*");
  EXPECT_EQ(end.exit_status, 0) << end.output;
  for (const std::string text : {"/case-0\n", "/case-1\n", "OK ] Inner.DISABLED_PassesToo"}) {
    EXPECT_NE(end.output.find(text), std::string::npos) << end.output;
  }
}

TEST(CasesAtOnceTest, OneThatFailsFailsTheTest) {
  const ProgramEnd end = run_inner("Passes:*Fails");
  EXPECT_EQ(end.exit_status, 1) << end.output;
  for (const std::string text : {"on purpose", "FAILED  ] Inner.DISABLED_Fails"}) {
    EXPECT_NE(end.output.find(text), std::string::npos) << end.output;
  }
}

TEST(CasesAtOnceTest, OneThatEndsItsProcessFailsTheTest) {
  for (const std::string name : {"Exits", "IsKilled"}) {
    const ProgramEnd end = run_inner("Passes:*" + name);
    EXPECT_EQ(end.exit_status, 1) << end.output;
    EXPECT_NE(end.output.find("RUN      ] Inner.DISABLED_" + name), std::string::npos)
        << end.output;
  }
}

TEST(CasesAtOnceTest, TheyRunAtOnceAndTheReportHasAll) {
  const std::string folder = testing::TempDir(), report = folder + "report.xml";
  const ProgramEnd end =
      run_inner("Meets*", "export MEETING=" + folder + " XML_OUTPUT_FILE=" + report + "; ");
  EXPECT_EQ(end.exit_status, 0) << end.output;
  std::ifstream file(report);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  for (const std::string name : {"DISABLED_Meets", "DISABLED_MeetsToo"}) {
    EXPECT_NE(text.find("<testcase name=\"" + name + "\" classname=\"Inner\" time="),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
