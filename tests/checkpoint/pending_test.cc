// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint_options.h: which thread writes, and when it stops.
#include "zero/checkpoint_options.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

// The thread, and whether lower_thread_priority() was called on it.
using Calls = std::vector<std::pair<std::thread::id, bool>>;

bool is_low() { return sched_getscheduler(0) == SCHED_IDLE || getpriority(PRIO_PROCESS, 0) == 19; }

// A write that is not done before it is called again.
PendingCheckpoint::Write write_in_two_calls(Calls& calls, std::promise<void>& begun) {
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
  PendingCheckpoint pending(copy, write_in_two_calls(calls, begun), [&] {
    finished = true;
    EXPECT_EQ(calls.size(), 2u) << "finished before all is written";
  });
  begun.get_future().wait();
  EXPECT_FALSE(finished);
  pending.finish();
  EXPECT_TRUE(finished);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].second, is_low()) << "a step may wait for it";
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_EQ(calls[0].first, copies[0].first);
  EXPECT_NE(calls[0].first, std::this_thread::get_id());
  EXPECT_TRUE(calls[0].second);
  EXPECT_EQ(calls[1].first, std::this_thread::get_id());
  EXPECT_EQ(calls[1].second, is_low());
  expect_words(error_of([&] { pending.finish(); }), {"one call for each save"});
}

TEST(PendingCheckpointTest, OneThatIsGivenUpStopsItsThread) {
  Calls calls;
  std::promise<void> begun;
  auto pending =
      std::make_unique<PendingCheckpoint>([] {}, write_in_two_calls(calls, begun), [] {});
  begun.get_future().wait();
  pending.reset();
  EXPECT_EQ(calls.size(), 1u);
}

// The memory of the copies goes with it.
TEST(PendingCheckpointTest, WhatTheWriteHoldsIsFreedByFinish) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  PendingCheckpoint pending([held] {}, [held](const std::atomic<bool>&) {}, [held] {});
  held.reset();
  pending.finish();
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace zero
