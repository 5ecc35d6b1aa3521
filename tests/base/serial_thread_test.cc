// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/serial_thread.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "zero/base/slow_wait.h"
#include "zero/base/threads.h"

namespace zero {
namespace {

TEST(SerialThreadTest, RunsTasksInTheirOrderOnOneThread) {
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  {
    SerialThread thread;
    for (int i = 0; i < 100; ++i) {
      thread.push([&, i] {
        order.push_back(i);
        threads.push_back(std::this_thread::get_id());
      });
    }
  }
  ASSERT_EQ(order.size(), 100U);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
  for (const std::thread::id id : threads) {
    EXPECT_EQ(id, threads[0]);
    EXPECT_NE(id, std::this_thread::get_id());
  }
}

TEST(SerialThreadTest, EndsWithoutATask) { const SerialThread thread; }

TEST(SerialThreadTest, AnEndThatWaitsLongForATaskHasALineAndShowsAllThreads) {
  const auto before = slow_wait_after();
  set_slow_wait_after(std::chrono::milliseconds(20));
  testing::internal::CaptureStderr();
  {
    SerialThread thread("counting");
    thread.push([&] { std::this_thread::sleep_for(std::chrono::milliseconds(1500)); });
  }
  set_slow_wait_after(before);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("waits for its thread \"zero counting\" to end\n"), std::string::npos)
      << text;
  const size_t states = text.find("to end, for long. The threads of process ");
  ASSERT_NE(states, std::string::npos) << text;
  EXPECT_NE(text.find("zero counting", states), std::string::npos) << text;
}

TEST(SerialThreadTest, ATaskMayPushAnother) {
  std::promise<int> done;
  SerialThread thread;
  thread.push([&] { thread.push([&] { done.set_value(3); }); });
  EXPECT_EQ(done.get_future().get(), 3);
}

// What a task owns ends before the next one starts.
TEST(SerialThreadTest, ATaskIsGoneWhenItIsDone) {
  SerialThread thread;
  const auto owned = std::make_shared<int>(1);
  std::promise<long> count;
  thread.push([owned] {});
  thread.push([&] { count.set_value(owned.use_count()); });
  EXPECT_EQ(count.get_future().get(), 1);
}

TEST(SerialThreadTest, RunsATaskInPushWhereNoThreadCanBeStarted) {
  SerialThread thread;
  threads_refused = true;
  EXPECT_THROW(thread.start(), c10::Error);
  std::thread::id ran_on;
  thread.push([&] { ran_on = std::this_thread::get_id(); });
  threads_refused = false;
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  std::promise<std::thread::id> done;
  thread.push([&] { done.set_value(std::this_thread::get_id()); });
  EXPECT_NE(done.get_future().get(), std::this_thread::get_id());
}

}  // namespace
}  // namespace zero
