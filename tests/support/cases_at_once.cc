// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/cases_at_once.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "tests/support/end_at_once.h"
#include "tests/support/files.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Case {
  pid_t pid = -1;  // of its process while it runs
  bool passed = false;
  fs::path folder, output, report;
};

// GoogleTest knows the file for its report before it knows the case.
void write_report_of(const Case& c) {
  std::ofstream report(c.report);
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int k = 0; k < suite.total_test_count(); ++k) {
      const testing::TestInfo& test = *suite.GetTestInfo(k);
      if (!test.should_run()) continue;
      report << "<testsuite name=\"" << suite.name() << "\"><testcase name=\"" << test.name()
             << "\" classname=\"" << suite.name() << "\" time=\""
             << static_cast<double>(test.result()->elapsed_time()) / 1000 << "\">"
             << (test.result()->Failed() ? "<failure message=\"see the log\"/>" : "")
             << "</testcase></testsuite>\n";
    }
  }
}

// Case number `index` of `count`, of those that Bazel wants from this shard.
int run_case(const Case& c, int index, int count) {
  const std::string shards = variable("GTEST_TOTAL_SHARDS"), shard = variable("GTEST_SHARD_INDEX");
  const int all = shards.empty() ? 1 : std::stoi(shards);
  const int own = shard.empty() ? 0 : std::stoi(shard);
  setenv("GTEST_TOTAL_SHARDS", std::to_string(all * count).c_str(), /*overwrite=*/1);
  setenv("GTEST_SHARD_INDEX", std::to_string(own + all * index).c_str(), /*overwrite=*/1);
  setenv("TEST_TMPDIR", c.folder.c_str(), /*overwrite=*/1);
  const int status = RUN_ALL_TESTS();
  write_report_of(c);
  return status;
}

void start(Case& c, int index, int count, const sigset_t& signals) {
  c.folder = fs::path(testing::TempDir()) / ("case-" + std::to_string(index));
  c.output = c.folder / "output";
  c.report = c.folder / "report.xml";
  fs::remove_all(c.folder);
  fs::create_directories(c.folder);
  const pid_t parent = getpid();
  c.pid = fork();
  if (c.pid != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  if (std::freopen(c.output.c_str(), "w", stdout) == nullptr) _exit(1);
  dup2(STDOUT_FILENO, STDERR_FILENO);
  end_at_once(run_case(c, index, count));
}

// Runs `at_once` of the cases at any time; ends where this process is to end.
void run_all(std::vector<Case>& cases, int at_once) {
  sigset_t watched, before;
  sigemptyset(&watched);
  for (const int signal : {SIGCHLD, SIGTERM}) sigaddset(&watched, signal);
  sigprocmask(SIG_BLOCK, &watched, &before);
  const int count = static_cast<int>(cases.size());
  int started = 0, ended = 0;
  while (ended < count) {
    while (started < count && started - ended < at_once) {
      start(cases[started], started, count, before);
      ++started;
    }
    int signal = 0;
    sigwait(&watched, &signal);
    for (Case& c : cases) {
      if (c.pid <= 0) continue;
      if (signal == SIGTERM) kill(c.pid, SIGKILL);
      int status = 0;
      if (waitpid(c.pid, &status, signal == SIGTERM ? 0 : WNOHANG) != c.pid) continue;
      c.passed = status == 0 && fs::exists(c.report);
      c.pid = -1;
      ++ended;
    }
    if (signal == SIGTERM) return;
  }
}

// One report of all, where Bazel asks for one.
void write_report(const std::vector<Case>& cases) {
  const std::string path = variable("XML_OUTPUT_FILE");
  if (path.empty()) return;
  std::ofstream report(path, std::ios::binary);
  report << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n";
  for (const Case& c : cases) report << content(c.report);
  report << "</testsuites>\n";
}

}  // namespace

int run_cases_at_once(int argc, char** argv, int at_once) {
  testing::InitGoogleTest(&argc, argv);
  const bool of_death_test = !GTEST_FLAG_GET(internal_run_death_test).empty();
  if (of_death_test || GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  std::vector<Case> cases(testing::UnitTest::GetInstance()->total_test_count());
  run_all(cases, at_once);
  bool passed = true;
  for (const Case& c : cases) {
    std::cout << content(c.output) << std::flush;
    passed = passed && c.passed;
  }
  write_report(cases);
  end_at_once(passed ? 0 : 1);
}

}  // namespace zero
