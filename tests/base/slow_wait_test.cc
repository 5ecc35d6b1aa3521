// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/slow_wait.h"

#include <ATen/ops/full.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/base/own_thread_wait.h"
#include "zero/base/threads.h"
#include "zero/communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

class SlowWaitTest : public testing::Test {
 protected:
  SlowWaitTest() : before_(slow_wait_after()) { set_slow_wait_after(milliseconds(300)); }
  ~SlowWaitTest() override { set_slow_wait_after(before_); }
  const milliseconds before_;
};

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

TEST_F(SlowWaitTest, EveryLongWaitHasOneLine) {
  set_slow_wait_after(milliseconds(10));
  testing::internal::CaptureStderr();
  std::array<std::atomic<int>, 3> asked{};
  const auto text_of = [&](int wait) {
    return [&asked, wait] {
      ++asked[wait];
      return "wait " + std::to_string(wait);
    };
  };
  const auto await = [&](int wait) {
    while (asked[wait] == 0) std::this_thread::sleep_for(milliseconds(5));
  };
  {
    const SlowWait first(text_of(0)), second(text_of(1));
    {
      const SlowWait third(text_of(2));
      await(2);
    }
    for (const int wait : {0, 1}) await(wait);
    std::this_thread::sleep_for(milliseconds(100));
  }
  const std::string text = testing::internal::GetCapturedStderr();
  for (const char* line : {"zero: wait 0\n", "zero: wait 1\n", "zero: wait 2\n"}) {
    EXPECT_EQ(count(text, line), 1) << text;
  }
}

TEST_F(SlowWaitTest, SaysOnceForWhom) {
  testing::internal::CaptureStderr();
  run_ranks(3,
            [](const Group& group) {
              if (group.rank() == 1) std::this_thread::sleep_for(milliseconds(1200));
              const auto communicator = group.make_communicator("data", Purpose::kData);
              if (group.rank() == 2) std::this_thread::sleep_for(milliseconds(1200));
              communicator->gather_rows(at::full({3, 1}, 1.0), "rows").wait();
              communicator->gather_rows(at::full({3, 1}, 1.0), "more rows").wait();
            },
            {.transport = kRealTransport});
  const std::string text = testing::internal::GetCapturedStderr();
  for (int rank : {0, 2}) {
    EXPECT_EQ(count(text, "zero: rank " + std::to_string(rank) +
                              " of 3 waits for rank 1 to connect communicator \"test/data\" (up to "
                              "30 s)\n"),
              1)
        << text;
  }
  for (int rank : {0, 1}) {
    EXPECT_EQ(count(text, "zero: rank " + std::to_string(rank) +
                              " of 3 waits for rank 2: gather_rows of rows in group \"test/data\" "
                              "(up to 30 s)\n"),
              1)
        << text;
  }
  EXPECT_EQ(count(text, "more rows"), 0) << text;
}

// As on a terminal that is paused: what cannot print does not stop what waits.
TEST_F(SlowWaitTest, AStderrThatNobodyReadsStopsNoWait) {
  set_slow_wait_after(milliseconds(10));
  std::signal(SIGPIPE, SIG_IGN);  // of a line that is later than this test
  std::array<int, 2> ends{};
  ASSERT_EQ(pipe(ends.data()), 0);
  const int capacity = fcntl(ends[1], F_GETPIPE_SZ);
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  std::atomic<bool> asked{false};
  {
    const SlowWait wait([&] {
      asked = true;
      return std::string(static_cast<size_t>(capacity) + 1, 'x');
    });
    while (!asked) std::this_thread::sleep_for(milliseconds(5));
    std::this_thread::sleep_for(milliseconds(200));  // it stands in a write
    // Others look, have lines of their own, and end.
    std::atomic<int> looks{0};
    const SlowWait next([] { return std::string("another"); }, [&looks] { ++looks; });
    while (looks < 3) std::this_thread::sleep_for(milliseconds(5));
    OwnThreadWait thread("rank 1 of 4 waits for its thread", milliseconds(0));
    const auto look_until_it_ends = [&] {
      for (int look = 0; look < 20; ++look) thread.look(0);
    };
    expect_words(error_of(look_until_it_ends), {"which has done nothing for"});
  }
  for (int line = 0; line < 40; ++line) print_slow_wait("one of many");
  // Those that still come.
  std::string text;
  std::vector<char> part(static_cast<size_t>(capacity));
  pollfd readable{ends[0], POLLIN, 0};
  while (poll(&readable, 1, 500) == 1) {
    const ssize_t bytes = read(ends[0], part.data(), part.size());
    ASSERT_GT(bytes, 0);
    text.append(part.data(), static_cast<size_t>(bytes));
  }
  dup2(before, STDERR_FILENO);
  EXPECT_LE(count(text, "one of many"), 16);
  for (const int end : {ends[0], ends[1], before}) close(end);
}

TEST_F(SlowWaitTest, ShortWaitsSayNothing) {
  testing::internal::CaptureStderr();
  {
    const SlowWait wait([] { return std::string("unexpected"); });
    std::this_thread::sleep_for(milliseconds(100));
  }
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(SlowWaitTest, AWaitForAThreadThatStandsStillHasALineAndEnds) {
  set_slow_wait_after(milliseconds(1000));
  testing::internal::CaptureStderr();
  OwnThreadWait wait("rank 1 of 4 waits for its thread", milliseconds(2000));
  for (int look = 0; look < 20; ++look) wait.look(look);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  for (int look = 0; look < 7; ++look) wait.look(-2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "zero: rank 1 of 4 waits for its thread (up to 2 s)\n");
  testing::internal::CaptureStderr();
  std::promise<void> end;
  std::thread stands_still = start_thread([&] { end.get_future().wait(); }, "still");
  expect_words(error_of([&] { wait.look(-2); }),
               {"rank 1 of 4 waits for its thread", "has done nothing for 8 s", "gdb"});
  end.set_value();
  stands_still.join();
  // The one that calls, and the one that it waits for.
  expect_words(testing::internal::GetCapturedStderr(),
               {"zero: rank 1 of 4 waits for its thread, which has done nothing for 8 s. The "
                "threads of process " +
                    std::to_string(getpid()) + ":\n",
                "  thread " + std::to_string(getpid()) + " (", "): state R, ",
                "(zero still): state ", " ms of processor time"});
}

TEST(DurationTest, Texts) {
  EXPECT_EQ(duration_text(milliseconds(1500)), "1500 ms");
  EXPECT_EQ(duration_text(milliseconds(90000)), "90 s");
  EXPECT_EQ(duration_text(milliseconds(600000)), "10 min");
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
