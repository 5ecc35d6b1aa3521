// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/bounded_store.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/frozen_store.h"
#include "zero/errors.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

TEST(BoundedStoreTest, EveryCallOfAFrozenStoreEnds) {
  const std::vector<uint8_t> value{1, 2};
  const std::vector<std::function<void(c10d::Store&)>> calls{
      [&](c10d::Store& s) { s.set("a", value); },
      [&](c10d::Store& s) { s.compareSet("a", {}, value); },
      [&](c10d::Store& s) { s.get("a"); },
      [&](c10d::Store& s) { s.add("n", 1); },
      [&](c10d::Store& s) { s.deleteKey("b"); },
      [&](c10d::Store& s) { s.check({"a"}); },
      [&](c10d::Store& s) { s.getNumKeys(); },
      [&](c10d::Store& s) { s.wait({"a"}); },
      [&](c10d::Store& s) { s.wait({"a"}, std::chrono::hours(1)); },
      [&](c10d::Store& s) { s.append("a", value); },
      [&](c10d::Store& s) { s.multiGet({"a"}); },
      [&](c10d::Store& s) { s.multiSet({"a"}, {value}); },
  };
  const auto check = [&](size_t i) {
    SCOPED_TRACE("call " + std::to_string(i));
    const auto frozen = c10::make_intrusive<FrozenStore>();
    frozen->set("a", value);
    frozen->freeze(true);
    const auto store =
        c10::make_intrusive<BoundedStore>(frozen, milliseconds(200), "the store of rank 7");
    const auto bounded = [&] { return i == 8 ? store->within(milliseconds(200)) : store; };
    const auto asked = bounded();
    expect_words(error_within(milliseconds(300), [&] { calls[i](*asked); }),
                 {"the store of rank 7 did not answer within 200 ms", "stopped", "silent"});
    // The next one waits for what hangs, whichever prefix it has.
    const auto other = bounded()->under("prefix");
    expect_words(error_within(milliseconds(200), [&] { calls[i](*other); }),
                 {"the store of rank 7 did not answer to an earlier call"});
    frozen->freeze(false);
    std::this_thread::sleep_for(milliseconds(100));
    EXPECT_EQ(error_of([&] { calls[i](*store); }), "");
  };
  // All at once: what takes time is waiting.
  std::vector<std::future<void>> checks;
  for (size_t i = 0; i < calls.size(); ++i) {
    checks.push_back(std::async(std::launch::async, check, i));
  }
  for (std::future<void>& one : checks) one.get();
}

TEST(BoundedStoreTest, ALateCallMakesOthersWaitAndNotFail) {
  const auto frozen = c10::make_intrusive<FrozenStore>();
  frozen->freeze(true);
  const auto store = c10::make_intrusive<BoundedStore>(frozen, std::chrono::seconds(30));
  EXPECT_THROW(store->within(milliseconds(100))->set("a", std::string("late")), CommunicationError);
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(200));
    frozen->freeze(false);
  });
  EXPECT_EQ(store->get_to_str("a"), "late");
  EXPECT_FALSE(store->is_gone());
  later.join();
}

TEST(BoundedStoreTest, AForkedChildIsRefused) {
  const auto store =
      c10::make_intrusive<BoundedStore>(c10::make_intrusive<c10d::HashStore>(), milliseconds(5000));
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = error_of([&] { store->set("a", std::string("value")); });
    _exit(text.find("forked child") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(BoundedStoreTest, ValuesAndPrefixesAreThoseOfTheStore) {
  const auto plain = c10::make_intrusive<c10d::HashStore>();
  const auto store = c10::make_intrusive<BoundedStore>(plain, milliseconds(5000));
  const auto under = store->under("p")->under("q");
  under->set("key", std::string("value"));
  EXPECT_EQ(plain->get_to_str("p/q/key"), "value");
  EXPECT_EQ(under->get_to_str("key"), "value");
  EXPECT_EQ(under->add("n", 2), 2);
  EXPECT_EQ(under->within(milliseconds(1000))->add("n", 3), 5);
  EXPECT_TRUE(under->check({"key", "n"}));
  EXPECT_FALSE(store->check({"key"}));
  under->multiSet({"a", "b"}, {{1}, {2}});
  EXPECT_EQ(under->multiGet({"b", "a"}), (std::vector<std::vector<uint8_t>>{{2}, {1}}));
  EXPECT_TRUE(under->deleteKey("a"));
  EXPECT_EQ(BoundedStore::of(store, milliseconds(1)), store);
  EXPECT_FALSE(store->served_here());
}

TEST(BoundedStoreTest, ALimitForAllCallsRunsOut) {
  const auto store =
      c10::make_intrusive<BoundedStore>(c10::make_intrusive<c10d::HashStore>(), milliseconds(5000));
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(600));
    store->set("a", std::string("here"));
  });
  const auto limited = store->within(milliseconds(200));
  error_within(milliseconds(200), [&] { EXPECT_THROW(limited->get("b"), CommunicationError); });
  EXPECT_NE(error_within(milliseconds(0), [&] { limited->get("a"); }), "");
  EXPECT_EQ(limited->each_within(milliseconds(5000))->get_to_str("a"), "here");
  late.join();
}

TEST(BoundedStoreTest, WaitsForAKeyUntilTheTimeIsUp) {
  const auto store =
      c10::make_intrusive<BoundedStore>(c10::make_intrusive<c10d::HashStore>(), milliseconds(5000));
  expect_words(error_within(milliseconds(300),
                            [&] {
                              store->wait({"a", "b"}, milliseconds(300));
                            }),
               {"for \"a\" and 1 more keys"});
  expect_words(error_within(milliseconds(300), [&] { store->within(milliseconds(300))->get("a"); }),
               {"for \"a\""});
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(300));
    store->set("a", std::string("here"));
  });
  EXPECT_EQ(store->get_to_str("a"), "here");
  late.join();
}

}  // namespace
}  // namespace zero
