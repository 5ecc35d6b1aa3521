// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/detached_call.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>

#include "tests/support/error_of.h"

namespace zero {
namespace {

TEST(DetachedCallTest, ReturnsOrThrowsWhatTheCallDoesOnAnotherThread) {
  EXPECT_NE(start_detached([] { return std::this_thread::get_id(); }).get(),
            std::this_thread::get_id());
  EXPECT_EQ(start_detached([] { return std::make_unique<int>(7); }).get().operator*(), 7);
  auto thrown = start_detached([]() -> int { throw std::invalid_argument("no more sugar"); });
  EXPECT_THROW(thrown.get(), std::invalid_argument);
}

TEST(DetachedCallTest, ACallMayBeLeftBehind) {
  const auto released = std::make_shared<std::latch>(1), ended = std::make_shared<std::latch>(1);
  {
    const auto left = start_detached([released, ended] {
      released->wait();
      ended->count_down();
    });
    EXPECT_EQ(left.wait_for(std::chrono::milliseconds(1)), std::future_status::timeout);
  }
  released->count_down();
  ended->wait();
}

// Says when it ends, and takes its time for it.
struct Owned {
  ~Owned() {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    *ended = true;
  }
  std::shared_ptr<bool> ended;
};

TEST(DetachedCallTest, WhatTheCallOwnsHasEndedWhenTheResultIsThere) {
  for (const bool throws : {false, true}) {
    const auto ended = std::make_shared<bool>(false);
    auto owned = std::make_unique<Owned>();
    owned->ended = ended;
    auto result = start_detached([owned = std::move(owned), throws]() -> int {
      if (throws) throw std::invalid_argument("no more sugar");
      return 0;
    });
    result.wait();
    EXPECT_TRUE(*ended);
  }
}

bool is_detached() {
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  int state = PTHREAD_CREATE_JOINABLE;
  pthread_attr_getdetachstate(&attributes, &state);
  pthread_attr_destroy(&attributes);
  return state == PTHREAD_CREATE_DETACHED;
}

// Not made so by its caller, which then may look at a thread that has ended: see threads.h.
TEST(DetachedCallTest, TheThreadIsDetachedFromTheBeginning) {
  for (int i = 0; i < 300; ++i) EXPECT_TRUE(start_detached([] { return is_detached(); }).get());
}

TEST(DetachedCallTest, ThrowsWhereNoThreadCanBeStarted) {
  const auto owned = std::make_shared<int>(7);
  threads_refused = true;
  expect_words(error_of([&] { start_detached([owned] { return *owned; }); }),
               {"cannot start a thread", "ulimit -u"});
  threads_refused = false;
  EXPECT_EQ(owned.use_count(), 1);
}

}  // namespace
}  // namespace zero
