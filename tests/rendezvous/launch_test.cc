// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// launch_local() with real processes.
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/run_program.h"
#include "zero/launch.h"
#include "zero/rendezvous/usable_cores.h"

namespace zero {
namespace {

struct Outcome {
  int code = -1;
  std::string output;
  std::chrono::steady_clock::duration duration{};
  bool has(const std::string& text) const { return output.find(text) != std::string::npos; }
};

std::string program() { return path_in("LAUNCH_PROGRAM", "tests/rendezvous/launch_program"); }

Outcome launch(const std::string& arguments) {
  const auto start = std::chrono::steady_clock::now();
  const auto [code, output] = run_program("exec " + program() + " " + arguments);
  return {code, output, std::chrono::steady_clock::now() - start};
}

TEST(LaunchTest, RanksMeetAndTalk) {
  unsetenv("OMP_NUM_THREADS");
  const Outcome outcome = launch("3 ok prefix");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (const char* line : {"[0] round 0 of rank 0: 0 1 4 \n", "[2] round 1 of rank 2: 0 1 4 \n"}) {
    EXPECT_TRUE(outcome.has(line)) << outcome.output;
  }
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(line.substr(0, 1), "[") << "a line without its rank: " << line;
  }
  const int threads = std::max(1, usable_cores() / 3);
  EXPECT_TRUE(outcome.has("[2] threads " + std::to_string(threads) + "\n")) << outcome.output;
}

TEST(LaunchTest, WithoutLibuvAndWithTheUsersNumberOfThreads) {
  setenv("USE_LIBUV", "0", 1);
  setenv("OMP_NUM_THREADS", "5", 1);
  const Outcome outcome = launch("2 ok prefix");
  unsetenv("USE_LIBUV");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_TRUE(outcome.has("[1] threads 5\n")) << outcome.output;
}

TEST(LaunchTest, OneRankIsThisProcess) {
  const Outcome outcome = launch("1 ok prefix");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_TRUE(outcome.has("round 0 of rank 0: 0 \n")) << outcome.output;
  EXPECT_FALSE(outcome.has("[0]"));
}

// As Kubernetes' PyTorchJob starts a pod that is alone.
TEST(LaunchTest, TheOnlyRankOfALauncherSaysThatItStartsNoOthers) {
  const auto [code, output] = run_program(
      "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 exec " + program() + " 3 ok");
  EXPECT_EQ(code, 0) << output;
  EXPECT_NE(output.find("unset them to start 3 ranks"), std::string::npos) << output;
  EXPECT_NE(output.find("round 0 of rank 0: 0 \n"), std::string::npos) << output;
}

TEST(LaunchTest, RanksThatShareNoMemorySayWhy) {
  const auto [code, output] = run_program("ulimit -f 1000000; exec " + program() + " 2 ok prefix");
  EXPECT_EQ(code, 0) << output;
  EXPECT_NE(output.find("round 1 of rank 1: 0 1 "), std::string::npos) << output;
  EXPECT_NE(output.find("although 2 ranks were started on this one"), std::string::npos) << output;
}

TEST(LaunchTest, TheFirstFailureDecidesAndEndsTheOthers) {
  const Outcome outcome = launch("3 code");
  EXPECT_EQ(outcome.code, 7);
  EXPECT_TRUE(outcome.has("rank 1 of 3 failed with exit code 7")) << outcome.output;
  EXPECT_LT(outcome.duration, std::chrono::seconds(30));
}

TEST(LaunchTest, ASignalIsAFailure) {
  const Outcome outcome = launch("2 signal");
  EXPECT_EQ(outcome.code, 128 + SIGKILL);
  EXPECT_TRUE(outcome.has("rank 1 of 2 ended by signal 9")) << outcome.output;
}

TEST(LaunchTest, AnExceptionIsAFailure) {
  const Outcome outcome = launch("2 throw prefix");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(outcome.has("[1] error: this is what rank 1 throws\n")) << outcome.output;
}

TEST(LaunchTest, ARankThatIgnoresSigtermIsKilled) {
  const Outcome outcome = launch("3 stubborn");
  EXPECT_EQ(outcome.code, 9) << outcome.output;
  EXPECT_LT(outcome.duration, std::chrono::seconds(30));
}

TEST(LaunchTest, RanksThatFailAreReplacedByProcessesThatJoin) {
  const Outcome outcome = launch("3 replace prefix");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (const char* text :
       {"rank 1 of 3 failed with exit code 7; the others go on", "starting rank 3, which joins",
        "[3] joined as 3 on device 1\n", "rank 3 failed with exit code 5; the others go on",
        "starting rank 4, which joins", "[4] joined as 4 on device 1\n",
        "[4] communicator \"world/data\": expected a group of ranks that run, got that of process "
        "4",
        "rank 4 failed with exit code 5; the others go on"}) {
    EXPECT_TRUE(outcome.has(text)) << text << "\n" << outcome.output;
  }
  EXPECT_FALSE(outcome.has("starting rank 5")) << outcome.output;
}

TEST(LaunchTest, AReplacementOfAJobThatHasNotMetEndsWithIt) {
  const Outcome outcome = launch("2 early prefix");
  EXPECT_EQ(outcome.code, 7) << outcome.output;
  EXPECT_TRUE(outcome.has("rank 2 cannot join the job: all its ranks have ended\n"))
      << outcome.output;
  EXPECT_LT(outcome.duration, std::chrono::seconds(30));
}

TEST(LaunchTest, AJobOfWhichARankHasEndedWellStartsNoReplacement) {
  const Outcome outcome = launch("3 after");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_TRUE(outcome.has("rank 1 of 3 failed with exit code 7")) << outcome.output;
  EXPECT_FALSE(outcome.has("starting rank 3")) << outcome.output;
}

TEST(LaunchTest, ARankThatCannotBeStartedEndsThoseBeforeIt) {
  const Outcome outcome = launch("3 no_third");
  EXPECT_EQ(outcome.code, 4) << outcome.output;
  EXPECT_TRUE(outcome.has("cannot start rank 2 of 3")) << outcome.output;
  EXPECT_LT(outcome.duration, std::chrono::seconds(30));
}

TEST(LaunchTest, ALateRankIsNamed) {
  const Outcome outcome = launch("3 late prefix");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(outcome.has("missing: rank 1")) << outcome.output;
}

TEST(LaunchTest, ARankThatComesTwiceIsRefused) {
  // Rank 0 says that not all ranks arrived, unless the launcher ends it before.
  const Outcome outcome = launch("3 twice prefix");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(outcome.has("expected one process with RANK 1, got two")) << outcome.output;
}

// Starts a job of two sleeping ranks and returns the pids that they print; `parent` gets its own.
std::set<int> start_sleepers(FILE*& pipe, int& parent, const std::string& scene = "sleep") {
  pipe = popen(("echo $$; exec " + program() + " 2 " + scene + " 2>&1").c_str(), "r");
  std::set<int> pids;
  char line[256];
  if (pipe == nullptr || std::fgets(line, sizeof(line), pipe) == nullptr) return pids;
  parent = std::atoi(line);
  while (pids.size() < 2 && std::fgets(line, sizeof(line), pipe) != nullptr) {
    int pid = 0;
    const char* text = std::strstr(line, "pid ");
    if (text != nullptr && std::sscanf(text, "pid %d", &pid) == 1) pids.insert(pid);
  }
  return pids;
}

// The local addresses, as /proc/net shows them, at which process `pid` listens.
std::set<std::string> listening(int pid) {
  std::set<std::string> inodes;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    std::error_code ignored;
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.rfind("socket:[", 0) == 0) inodes.insert(target.substr(8, target.size() - 9));
  }
  std::set<std::string> addresses;
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string word, local, remote, state, inode;
      words >> word >> local >> remote >> state >> word >> word >> word >> word >> word >> inode;
      if (state == "0A" && inodes.count(inode) > 0) {
        addresses.insert(local.substr(0, local.find(':')));
      }
    }
  }
  return addresses;
}

bool all_gone(const std::set<int>& pids) {
  for (int tries = 0; tries < 500; ++tries) {
    bool gone = true;
    for (const int pid : pids) gone = gone && kill(pid, 0) != 0;
    if (gone) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

TEST(LaunchTest, TheStoreIsOutOfReachOfOtherMachines) {
  for (const char* libuv : {"1", "0"}) {
    setenv("USE_LIBUV", libuv, 1);
    FILE* pipe = nullptr;
    int parent = 0;
    const std::set<int> pids = start_sleepers(pipe, parent);
    unsetenv("USE_LIBUV");
    ASSERT_EQ(pids.size(), 2u);
    EXPECT_EQ(listening(parent), std::set<std::string>{"0100007F"});
    kill(parent, SIGKILL);
    pclose(pipe);
    EXPECT_TRUE(all_gone(pids));
  }
}

TEST(LaunchTest, AProgressBarIsSeenWhileItRuns) {
  FILE* pipe = popen(("echo $$; exec " + program() + " 2 bar prefix 2>&1").c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  char line[256];
  ASSERT_NE(std::fgets(line, sizeof(line), pipe), nullptr);
  const int parent = std::atoi(line);
  std::map<std::string, std::string> seen;  // by rank
  for (int ends = 0; ends < 2 && std::fgets(line, sizeof(line), pipe) != nullptr;) {
    const std::string text = line;
    if (text.size() > 3) seen[text.substr(0, 4)] += text.substr(4);
    ends += text.find("half") != std::string::npos;
  }
  kill(parent, SIGTERM);
  while (std::fgetc(pipe) != EOF) {  // What it says at the end must have a reader.
  }
  pclose(pipe);
  const std::string expected = "10%\n20%\ndone\nnext\n\nlast\nhalf\n";
  EXPECT_EQ(seen, (std::map<std::string, std::string>{{"[0] ", expected}, {"[1] ", expected}}));
}

TEST(LaunchTest, SigtermAndSighupReachTheRanks) {
  for (const int signal : {SIGTERM, SIGHUP}) {
    FILE* pipe = nullptr;
    int parent = 0;
    const std::set<int> pids = start_sleepers(pipe, parent);
    ASSERT_EQ(pids.size(), 2u);
    kill(parent, signal);
    std::string output;
    for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
    const int status = pclose(pipe);
    EXPECT_EQ(WEXITSTATUS(status), 128 + signal);
    EXPECT_NE(output.find("ended by signal " + std::to_string(signal)), std::string::npos)
        << output;
    EXPECT_EQ(output.find("stopping the others"), std::string::npos) << "all were told: " << output;
    EXPECT_TRUE(all_gone(pids));
  }
}

// The grace of the scenes is 0.3 s, that after a signal a minute and more.
TEST(LaunchTest, RanksHaveTimeToSaveAfterASignal) {
  for (const auto& [scene, expected] :
       {std::pair{"save", 0}, std::pair{"save_fail", 7}, std::pair{"save_without", 0}}) {
    FILE* pipe = nullptr;
    int parent = 0;
    const std::set<int> pids = start_sleepers(pipe, parent, scene);
    ASSERT_EQ(pids.size(), 2u);
    const auto start = std::chrono::steady_clock::now();
    kill(parent, SIGTERM);
    std::string output;
    for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
    EXPECT_EQ(WEXITSTATUS(pclose(pipe)), expected) << output;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30)) << scene;
    EXPECT_TRUE(all_gone(pids));
  }
}

TEST(LaunchTest, ACtrlCAtATerminalHasALimitAndIsNotSentOn) {
  int terminal = -1;
  const pid_t parent = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (parent == 0) {
    execl(program().c_str(), program().c_str(), "2", "interrupt", nullptr);
    _exit(127);
  }
  ASSERT_GT(parent, 0);
  std::string output;
  size_t pids = 0;
  bool interrupted = false;
  char next = 0;
  while (read(terminal, &next, 1) == 1) {  // it fails when the last process has ended
    output += next;
    pids += output.ends_with("pid ");
    if (pids < 2 || next != '\n' || interrupted) continue;
    interrupted = true;
    EXPECT_EQ(write(terminal, "\x03", 1), 1);
  }
  close(terminal);
  int status = 0;
  EXPECT_EQ(waitpid(parent, &status, 0), parent);
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT) << output;
  EXPECT_NE(output.find("rank 1 of 2 ended by signal 9"), std::string::npos) << output;
  EXPECT_EQ(output.find("starting rank 2"), std::string::npos) << output;
  EXPECT_NE(output.find("interrupted"), std::string::npos) << output;
  EXPECT_EQ(output.find("interrupted"), output.rfind("interrupted")) << output;
}

// As a pager does at the end of its page, or a terminal over a connection that was lost.
TEST(LaunchTest, AReaderThatStallsKeepsNoSignalFromTheRanks) {
  FILE* pipe = nullptr;
  int parent = 0;
  const std::set<int> pids = start_sleepers(pipe, parent, "flood prefix");
  ASSERT_EQ(pids.size(), 2u);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the pipe is full then
  kill(parent, SIGTERM);
  EXPECT_TRUE(all_gone(pids));
  std::string output;
  char line[256];
  while (std::fgets(line, sizeof(line), pipe) != nullptr) output += line;
  EXPECT_EQ(WEXITSTATUS(pclose(pipe)), 128 + SIGTERM);
  EXPECT_NE(output.find("ended by signal 15"), std::string::npos) << "it is kept for the reader";
}

// As under nohup.
TEST(LaunchTest, ASighupThatIsIgnoredStaysSo) {
  std::signal(SIGHUP, SIG_IGN);
  FILE* pipe = nullptr;
  int parent = 0;
  const std::set<int> pids = start_sleepers(pipe, parent);
  std::signal(SIGHUP, SIG_DFL);
  ASSERT_EQ(pids.size(), 2u);
  kill(parent, SIGHUP);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  for (const int pid : pids) EXPECT_EQ(kill(pid, 0), 0);
  kill(parent, SIGTERM);
  std::string output;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
  EXPECT_EQ(WEXITSTATUS(pclose(pipe)), 128 + SIGTERM) << output;
  EXPECT_TRUE(all_gone(pids));
}

// As below a supervisor that ignores SIGCHLD, for which Linux reaps children by itself.
TEST(LaunchTest, ExitCodesAreReadWhereSigchldIsIgnored) {
  // bash, since dash does not pass on what it ignores, and below timeout, which sets it back.
  const std::string ignoring = "exec timeout -k 1 60 bash -c \"trap '' CHLD; exec " + program();
  EXPECT_EQ(run_program(ignoring + " 2 ok prefix\"").exit_status, 0);
  const auto [code, output] = run_program(ignoring + " 3 code\"");
  EXPECT_EQ(code, 7) << output;
}

TEST(LaunchTest, ReplacementsOfAJobThatEndsWithARankAreRefused) {
  const auto none = [] { return 0; };
  expect_words(error_of([&] { launch_local(1, none, {.replacements = 2}); }),
               {"expected survivors_go_on", "got 2 replacements", "set LaunchOptions"});
  EXPECT_EQ(launch_local(1, none, {.survivors_go_on = true, .replacements = 2}), 0);
}

TEST(LaunchTest, RanksDieWithTheirParent) {
  FILE* pipe = nullptr;
  int parent = 0;
  const std::set<int> pids = start_sleepers(pipe, parent);
  ASSERT_EQ(pids.size(), 2u);
  kill(parent, SIGKILL);
  pclose(pipe);
  EXPECT_TRUE(all_gone(pids));
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
