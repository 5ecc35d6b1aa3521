// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Two jobs that were given one MASTER_PORT: ranks of both never train together, and each is told.
// And one job that is started again over one store.
#include <arpa/inet.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/free_port.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/job.h"
#include "zero/rendezvous/tcp_store.h"

namespace zero {
namespace {

// One rank, as a user starts it by hand.
class Process {
 public:
  // `variables` for example "RANK=1 WORLD_SIZE=2".
  Process(const std::string& variables, uint16_t port, const std::string& hold) {
    const std::string command =
        "echo $$; MEETINGS=2 HOLD=" + hold + " " + variables +
        " LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(port) +
        " GLOO_SOCKET_IFNAME=lo exec tests/rendezvous/launch_program 9 "
        "hold 2>&1";
    pipe_ = popen(command.c_str(), "r");
    pid_ = std::atoi(line().c_str());
  }
  ~Process() { rest(); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  // Returns the next line, but for what a slow machine has a rank say of its waits; empty at the
  // end.
  std::string line() {
    std::array<char, 4096> buffer{};
    std::string text;
    do {
      if (pipe_ == nullptr || std::fgets(buffer.data(), buffer.size(), pipe_) == nullptr) return {};
      text = buffer.data();
    } while (text.starts_with("zero: rank ") && text.find(" waits for ") != std::string::npos);
    return text;
  }
  // Returns what is left when the process has ended.
  std::string rest() {
    std::string text;
    for (std::string next = line(); !next.empty(); next = line()) text += next;
    if (pipe_ != nullptr) pclose(pipe_);
    pipe_ = nullptr;
    return text;
  }

 private:
  FILE* pipe_ = nullptr;
  pid_t pid_ = 0;
};

class TwoJobsTest : public testing::Test {
 protected:
  TwoJobsTest() { std::ofstream(hold_) << "1"; }
  ~TwoJobsTest() override { release(); }
  void release() { std::filesystem::remove(hold_); }
  Process start(const std::string& variables) { return Process(variables, port_, hold_); }
  // The two ranks of a job meet, and one of another job that came between them is told `words`.
  void expect_told(const std::string& job, const std::string& other,
                   const std::vector<std::string>& words);

  const uint16_t port_ = free_port();
  const std::string hold_ = testing::TempDir() + "/hold." + std::to_string(getpid());
};

// Returns when a process listens at this port.
void await_listener(uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  while (true) {
    const int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool listens =
        connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    close(probe);
    if (listens) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

constexpr const char* kTwoProcesses = "expected one process with RANK 0, got two";
constexpr const char* kMet0 = "rank 0 of 2 has met the others\n";
constexpr const char* kMet1 = "rank 1 of 2 has met the others\n";

void TwoJobsTest::expect_told(const std::string& job, const std::string& other,
                              const std::vector<std::string>& words) {
  Process first = start(job + "RANK=0 WORLD_SIZE=2");
  expect_words(start(other).rest(), words);
  Process second = start(job + "RANK=1 WORLD_SIZE=2");
  EXPECT_EQ(first.line(), kMet0);
  release();
  EXPECT_EQ(first.rest(), kMet0);
  EXPECT_EQ(second.rest(), std::string(kMet1) + kMet1);
}

TEST_F(TwoJobsTest, ARankOfAnotherJobIsToldSoAndDisturbsNothing) {
  expect_told("TORCHELASTIC_RUN_ID=one ", "TORCHELASTIC_RUN_ID=two RANK=1 WORLD_SIZE=2",
              {"rank 1 of 2 of job \"two\"", "rank 0 at 127.0.0.1", "serves 2 ranks of job \"one\"",
               "MASTER_PORT of its own"});
}

TEST_F(TwoJobsTest, ARankOfAJobOfAnotherSizeIsToldSoAndDisturbsNothing) {
  expect_told("", "RANK=2 WORLD_SIZE=3", {"rank 2 of 3", "rank 0 at 127.0.0.1", "serves 2 ranks"});
}

// Without an identifier nobody knows whose rank 1 will come: that of this job, or of the other.
TEST_F(TwoJobsTest, TheSecondRank0EndsAMeetingThatMayMixTwoJobs) {
  Process first = start("RANK=0 WORLD_SIZE=2");
  Process other = start("RANK=0 WORLD_SIZE=2");
  const std::string one = first.rest();
  const std::string two = other.rest();
  for (const std::string& text : {one, two}) {
    expect_words(text, {kTwoProcesses, "MASTER_PORT"});
  }
  // One of them serves the store.
  EXPECT_NE((one + two).find("cannot serve the store"), std::string::npos) << one << two;
}

TEST_F(TwoJobsTest, TheSecondRank0GivesTheFirstTimeToAnswer) {
  Process first = start("RANK=0 WORLD_SIZE=2");
  await_listener(port_);
  kill(first.pid(), SIGSTOP);
  Process second = start("RANK=0 WORLD_SIZE=2");
  std::this_thread::sleep_for(std::chrono::seconds(3));
  kill(first.pid(), SIGCONT);
  expect_words(second.rest(), {"cannot serve the store", kTwoProcesses});
  expect_words(first.rest(), {kTwoProcesses});
}

// On a busy machine it may overtake the first one, which serves the store already.
TEST_F(TwoJobsTest, TheSecondRank0TellsTheFirstThatHasNotComeYet) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = port_;
  options.waitWorkers = false;
  const auto store = open_tcp_store("127.0.0.1", options);
  claim_for_job(
      *BoundedStore::of(store, std::chrono::seconds(5))->under(prefix_of_restart_round(0)), "", 2);
  expect_words(start("RANK=0 WORLD_SIZE=2").rest(), {"cannot serve the store", kTwoProcesses});
  // The first one uses the same store.
  expect_words(start("TORCHELASTIC_USE_AGENT_STORE=True RANK=0 WORLD_SIZE=2").rest(),
               {kTwoProcesses});
}

TEST_F(TwoJobsTest, AJobThatIsCompleteGoesOnWhateverComes) {
  Process first = start("RANK=0 WORLD_SIZE=2");
  Process second = start("RANK=1 WORLD_SIZE=2");
  EXPECT_EQ(first.line(), kMet0);
  EXPECT_EQ(second.line(), kMet1);
  for (const char* rank : {"0", "1"}) {
    Process other = start(std::string("WORLD_SIZE=2 RANK=") + rank);
    expect_words(other.rest(), {"expected one process with RANK " + std::string(rank),
                                "All 2 ranks of the job there had met before", "process "});
  }
  release();
  EXPECT_EQ(first.rest(), kMet0);
  EXPECT_EQ(second.rest(), kMet1);
}

// As a failure of its own may have cost it the group that the others have made.
TEST_F(TwoJobsTest, ARankThatIsBehindTheOthersMeetsThemAtTheirNextGroup) {
  release();
  Process first = start("RANK=0 WORLD_SIZE=2");
  EXPECT_EQ(start("MEETINGS=1 RANK=1 WORLD_SIZE=2").rest(), kMet1);
  EXPECT_EQ(first.line(), kMet0);
  std::string text;
  do {  // until rank 0 has begun the next one
    text = start("MEETINGS=1 RANK=1 WORLD_SIZE=2").rest();
  } while (text.find("had met before") != std::string::npos);
  EXPECT_EQ(text, kMet1);
  EXPECT_EQ(first.rest(), kMet0);
}

TEST_F(TwoJobsTest, ARankMayComeToTheNextGroupBeforeRank0HasLeftTheLast) {
  Process first = start("RANK=0 WORLD_SIZE=2");
  Process second = start("HOLD= RANK=1 WORLD_SIZE=2");
  EXPECT_EQ(first.line(), kMet0);
  EXPECT_EQ(second.line(), kMet1);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // it waits for rank 0 then
  release();
  EXPECT_EQ(second.rest(), kMet1);
  EXPECT_EQ(first.rest(), kMet0);
}

// Without libuv the end of a server writes to a pipe, which a child has of its parent.
TEST_F(TwoJobsTest, AForkedChildOfRank0LeavesItTheServerOfTheNextGroup) {
  release();
  Process first = start("USE_LIBUV=0 FORKS=1 RANK=0 WORLD_SIZE=2");
  Process second = start("USE_LIBUV=0 RANK=1 WORLD_SIZE=2");
  EXPECT_EQ(first.rest(), std::string(kMet0) + kMet0);
  EXPECT_EQ(second.rest(), std::string(kMet1) + kMet1);
}

// The rounds of one job whose launcher starts it again over one store.
class RoundsTest : public TwoJobsTest {
 protected:
  RoundsTest() {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.port = port_;
    options.waitWorkers = false;
    store_ = open_tcp_store("127.0.0.1", options);
  }
  // `restarts`: as the agent of this rank counts them.
  Process start_rank(int rank, int restarts) {
    return start(c10::str("TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=one MEETINGS=1 ",
                          "TORCHELASTIC_RESTART_COUNT=", restarts, " WORLD_SIZE=2 RANK=", rank));
  }

  c10::intrusive_ptr<c10d::Store> store_;
};

TEST_F(RoundsTest, RanksWhoseAgentsCountOtherRestartsMeet) {
  for (const int restarts : {0, 1}) {
    // The one that was not killed may come before or after the other.
    Process second = start_rank(1, restarts);
    Process first = start_rank(0, 0);
    EXPECT_EQ(first.line(), kMet0);
    EXPECT_EQ(second.line(), kMet1);
    kill(first.pid(), SIGKILL);
    kill(second.pid(), SIGKILL);
  }
}

TEST_F(RoundsTest, ARankThatWaitsInARoundWhoseRank0WasKilledMeetsTheNext) {
  Process killed = start_rank(0, 0);
  const auto bounded = BoundedStore::of(store_, std::chrono::seconds(30));
  bounded->wait({"zero/1/0/1/meeting/arrivals"});
  kill(killed.pid(), SIGKILL);
  killed.rest();
  Process second = start_rank(1, 1);
  bounded->wait({"zero/1/0/1/meeting/complete"});  // they seem to be two
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  Process first = start_rank(0, 1);
  EXPECT_EQ(first.line(), kMet0);
  EXPECT_EQ(second.line(), kMet1);
  release();
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
