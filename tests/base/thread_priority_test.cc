// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/base/thread_priority.h: which threads have the lower priority.
#include "zero/base/thread_priority.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <thread>

namespace zero {
namespace {

int nice_value() { return getpriority(PRIO_PROCESS, 0); }

TEST(ThreadPriorityTest, ALowerPriorityIsOfTheThreadAndThoseThatItStarts) {
  const int before = nice_value();
  int lowered = 0, started = 0, again = 0;
  std::thread([&] {
    lower_thread_priority();
    lowered = nice_value();
    std::thread([&] { started = nice_value(); }).join();
    lower_thread_priority();
    again = nice_value();
  }).join();
  EXPECT_EQ(lowered, std::min(before + 15, 19));
  EXPECT_EQ(started, lowered);
  EXPECT_EQ(again, 19);
  EXPECT_EQ(nice_value(), before);
}

}  // namespace
}  // namespace zero
