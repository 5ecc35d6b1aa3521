// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/base/thread_priority.h: which threads have the lower priority.
#include "zero/base/thread_priority.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <thread>

namespace zero {
namespace {

bool is_low() { return sched_getscheduler(0) == SCHED_IDLE || getpriority(PRIO_PROCESS, 0) == 19; }

TEST(ThreadPriorityTest, ALowerPriorityIsOfTheThreadAndThoseThatItStarts) {
  const bool before = is_low();
  bool lowered = false, started = false, again = false;
  std::thread([&] {
    lower_thread_priority();
    lowered = is_low();
    std::thread([&] { started = is_low(); }).join();
    lower_thread_priority();
    again = is_low();
  }).join();
  EXPECT_TRUE(lowered);
  EXPECT_TRUE(started);
  EXPECT_TRUE(again);
  EXPECT_EQ(is_low(), before);
}

}  // namespace
}  // namespace zero
