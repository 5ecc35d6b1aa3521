// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint/writer.h: which thread writes, and when it stops.
#include "zero/checkpoint/writer.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "zero/base/threads.h"

namespace zero {
namespace {

using namespace std::chrono_literals;

// The thread, and whether lower_thread_priority() was called on it.
using Calls = std::vector<std::pair<std::thread::id, bool>>;

bool is_low() { return sched_getscheduler(0) == SCHED_IDLE || getpriority(PRIO_PROCESS, 0) == 19; }

std::unique_ptr<PendingCheckpoint> start(BackgroundSave save) { return save.start(); }

// A write that is not done before it is called again.
std::function<void(const std::atomic<bool>& pause)> write_in_two_calls(Calls& calls,
                                                                       std::promise<void>& begun) {
  return [&](const std::atomic<bool>& pause) {
    calls.emplace_back(std::this_thread::get_id(), is_low());
    if (calls.size() > 1) return;
    begun.set_value();
    while (!pause) std::this_thread::yield();
  };
}

TEST(PendingCheckpointTest, AThreadOfLowPriorityWritesAndFinishWritesTheRestItself) {
  Calls copies, calls;
  std::promise<void> begun;
  bool finished = false;
  const auto copy = [&] { copies.emplace_back(std::this_thread::get_id(), is_low()); };
  const auto finish = [&](const std::function<void()>& write_rest) {
    EXPECT_EQ(calls.size(), 1u);
    write_rest();
    finished = true;
  };
  const auto pending = start({copy, write_in_two_calls(calls, begun), finish, "waits", 30s});
  begun.get_future().wait();
  EXPECT_FALSE(finished);
  pending->finish();
  EXPECT_TRUE(finished);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].second, is_low()) << "a step may wait for it";
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].first, copies[0].first);
  EXPECT_NE(calls[0].first, std::this_thread::get_id());
  EXPECT_TRUE(calls[0].second);
  EXPECT_EQ(calls[1].first, std::this_thread::get_id());
  EXPECT_EQ(calls[1].second, is_low());
  expect_words(error_of([&] { pending->finish(); }), {"one call for each save"});
}

// As by a call that the ranks may not make now.
TEST(PendingCheckpointTest, WhatRefusesFinishBeforeTheRestIsWrittenLeavesTheSaveToTheNextCall) {
  Calls calls;
  std::promise<void> begun;
  int refusals = 2;
  const auto finish = [&](const std::function<void()>& write_rest) {
    TORCH_CHECK(refusals == 0, "refused");
    write_rest();
  };
  const auto pending = start({[] {}, write_in_two_calls(calls, begun), finish, "waits", 30s});
  begun.get_future().wait();
  for (; refusals > 0; --refusals) expect_words(error_of([&] { pending->finish(); }), {"refused"});
  EXPECT_EQ(calls.size(), 1u) << "the thread goes on writing";
  pending->finish();
  EXPECT_EQ(calls.size(), 2u);
  expect_words(error_of([&] { pending->finish(); }), {"one call for each save"});
}

TEST(PendingCheckpointTest, WhatGoesWrongAfterTheRestIsWrittenEndsTheSave) {
  const auto finish = [](const std::function<void()>& write_rest) {
    write_rest();
    TORCH_CHECK(false, "failed");
  };
  const auto pending = start({[] {}, [](const std::atomic<bool>&) {}, finish, "waits", 30s});
  expect_words(error_of([&] { pending->finish(); }), {"failed"});
  expect_words(error_of([&] { pending->finish(); }), {"one call for each save"});
}

// As at the limit of processes.
TEST(PendingCheckpointTest, WithoutAThreadTheCopyIsMadeAtOnceAndFinishWritesEverything) {
  const auto here = std::this_thread::get_id();
  int copies = 0, writes = 0;
  threads_refused = true;
  const auto pending =
      start({[&] { copies += std::this_thread::get_id() == here; },
             [&](const std::atomic<bool>& pause) {
               EXPECT_FALSE(pause);
               writes += std::this_thread::get_id() == here;
             },
             [](const std::function<void()>& write_rest) { write_rest(); }, "waits", 30s});
  threads_refused = false;
  EXPECT_EQ(copies, 1) << "a step may change what is copied";
  EXPECT_EQ(writes, 0);
  pending->finish();
  EXPECT_EQ(copies, 1);
  EXPECT_EQ(writes, 1);
}

TEST(PendingCheckpointTest, OneThatIsGivenUpStopsItsThread) {
  Calls calls;
  std::promise<void> begun;
  auto pending = start({[] {}, write_in_two_calls(calls, begun), [](const auto&) {}, "waits", 30s});
  begun.get_future().wait();
  pending.reset();
  EXPECT_EQ(calls.size(), 1u);
}

// The memory of the copies goes with it.
TEST(PendingCheckpointTest, WhatTheWriteHoldsIsFreedByFinish) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  const auto pending =
      start({[held] {}, [held](const std::atomic<bool>&) {},
             [held](const std::function<void()>& write_rest) { write_rest(); }, "waits", 30s});
  held.reset();
  pending->finish();
  EXPECT_TRUE(watch.expired());
}

// As in a call of a file system whose server does not answer.
void leave_behind(bool finishes) {
  const auto answer = std::make_shared<std::promise<void>>();
  const auto ended = std::make_shared<std::promise<void>>();
  std::promise<void> begun;
  const auto write = [answer, ended, &begun](const std::atomic<bool>&) {
    begun.set_value();
    answer->get_future().wait();
    ended->set_value();
  };
  bool returned = false;
  {
    const auto pending =
        start({[] {}, write,
               [&](const std::function<void()>& write_rest) {
                 write_rest();
                 returned = true;
               },
               finishes ? "rank 1 of 4 waits for its thread" : "rank 2 of 4 waits for its thread",
               500ms});
    begun.get_future().wait();
    if (finishes) {
      expect_words(
          error_of([&] { pending->finish(); }),
          {"rank 1 of 4 waits for its thread", "has done nothing for 6 s: a call of the disk"});
    }
  }
  EXPECT_FALSE(returned);
  answer->set_value();  // what it uses is there
  ended->get_future().wait();
}

TEST(PendingCheckpointTest, AThreadThatStandsStillIsLeftBehind) {
  testing::internal::CaptureStderr();
  std::thread finishing(leave_behind, true);
  leave_behind(false);
  finishing.join();
  expect_words(testing::internal::GetCapturedStderr(),
               {"rank 1 of 4 waits for its thread", "rank 2 of 4 waits for its thread",
                "The threads of process"});
}

}  // namespace
}  // namespace zero
