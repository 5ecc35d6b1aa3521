// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/recovery/roll_call.h: who is on the list, who is waited for, and who was left behind.
#include "zero/recovery/roll_call.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/frozen_store.h"
#include "zero/rendezvous/ended_ranks.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr new_store() { return c10::make_intrusive<c10d::HashStore>(); }

std::unique_ptr<RollCall> member(const StorePtr& store, int rank, int world_size) {
  return std::make_unique<RollCall>(store, rank, world_size, std::chrono::seconds(30));
}

std::future<RollCall::Present> call(RollCall& roll, const std::string& text) {
  return std::async(std::launch::async, [&roll, text] { return roll.call(text); });
}

TEST(RollCallTest, AllWhoAreThereAreOnTheListWithTheirTexts) {
  const StorePtr store = new_store();
  std::vector<std::unique_ptr<RollCall>> rolls;
  for (int r = 0; r < 3; ++r) rolls.push_back(member(store, r, 3));
  std::vector<std::future<RollCall::Present>> calls;
  for (int r = 2; r >= 0; --r) calls.push_back(call(*rolls[r], "text " + std::to_string(r)));
  for (auto& c : calls) {
    const RollCall::Present present = c.get();
    EXPECT_EQ(present.ranks, (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(present.texts, (std::vector<std::string>{"text 0", "text 1", "text 2"}));
  }
}

TEST(RollCallTest, OneThatIsGoneIsLeftBehindAndNotExpectedAgain) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 3);
  const auto third = member(store, 2, 3);
  for (int i = 0; i < 2; ++i) {
    auto a = call(*first, "a");
    auto b = call(*third, "b");
    EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 2}));
    EXPECT_EQ(b.get().texts, (std::vector<std::string>{"a", "b"}));
  }
  EXPECT_EQ(first->calls(), 2);
}

// It has written its number down and sees the call late.
TEST(RollCallTest, OneThatHasJoinedAnotherRollIsWaitedForUntilItAnswers) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 2);
  const auto second = member(store, 1, 2);
  const std::vector<uint8_t> number{'2', ' '};
  store->append("zero/recovery/joined", number);
  auto a = call(*first, "a");
  auto b = call(*second, "b");
  store->append("0/joining", number);
  EXPECT_EQ(a.wait_for(milliseconds(2000)), std::future_status::timeout);
  store->set("0/text/2", std::vector<uint8_t>{'c'});
  store->append("0/alive", number);
  EXPECT_EQ(a.get().texts, (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(b.get().ranks, (std::vector<int>{0, 1, 2}));
}

TEST(RollCallTest, OneThatHasEndedIsNotWaitedForThoughItAnswered) {
  const StorePtr store = new_store();
  const auto bounded = BoundedStore::of(store, std::chrono::seconds(30));
  // In a group whose ranks have other numbers in the job.
  const std::vector<int> numbers{4, 5, 6};
  std::vector<std::unique_ptr<RollCall>> rolls;
  for (int r = 0; r < 3; ++r) {
    rolls.push_back(std::make_unique<RollCall>(bounded->under("roll"), r, 3,
                                               std::chrono::minutes(10), false, numbers));
  }
  auto a = call(*rolls[0], "a");
  auto c = call(*rolls[2], "c");
  EXPECT_EQ(a.wait_for(milliseconds(1500)), std::future_status::timeout) << "rank 1 answers";
  EXPECT_FALSE(rolls[0]->lost_one_of({0, 1, 2}));
  add_ended_rank(*bounded, 5);
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 2}));
  EXPECT_EQ(c.get().ranks, (std::vector<int>{0, 2}));
  EXPECT_TRUE(rolls[0]->lost_one_of({0, 1, 2}));
  EXPECT_FALSE(rolls[0]->lost_one_of({0, 2}));
}

TEST(RollCallTest, OneThatPausesIsWaitedForWhereItIsNeeded) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 3);
  auto a = std::async(std::launch::async, [&] {
    return first->call("a", [](const std::vector<std::string>& texts) { return texts.size() > 1; });
  });
  // A process that is stopped answers nothing.
  EXPECT_EQ(a.wait_for(milliseconds(2500)), std::future_status::timeout);
  const auto second = member(store, 1, 3);
  auto b = call(*second, "b");
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 1})) << "rank 2 is not needed";
  EXPECT_EQ(b.get().ranks, (std::vector<int>{0, 1}));
}

TEST(RollCallTest, OneThatComputesIsWaitedFor) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 2);
  const auto second = member(store, 1, 2);
  auto a = call(*first, "a");
  // Longer than a rank that is gone is waited for.
  EXPECT_EQ(a.wait_for(milliseconds(2500)), std::future_status::timeout);
  const std::vector<uint8_t> answers = store->get("0/alive");
  // The one that calls may answer itself, too, before its thread knows of the call.
  EXPECT_EQ(std::count(answers.begin(), answers.end(), '1'), 1) << "it answers once";
  auto b = call(*second, "b");
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(b.get().ranks, (std::vector<int>{0, 1}));
}

// What the caller saw before its pause is old then, and all others may have paused with it.
TEST(RollCallTest, OneThatAnswersIsNotLeftBehindSinceTheCallerHasPaused) {
  for (const milliseconds late : {milliseconds(0), milliseconds(1300)}) {
    const auto store = c10::make_intrusive<FrozenStore>();
    const auto first = member(store, 0, 2);
    store->pause_after("0/alive", milliseconds(1200));
    auto a = call(*first, "a");
    while (!store->paused()) std::this_thread::sleep_for(milliseconds(5));
    std::this_thread::sleep_for(late);
    const auto second = member(store, 1, 2);
    EXPECT_EQ(a.wait_for(milliseconds(2000)), std::future_status::timeout) << "rank 1 answers";
    auto b = call(*second, "b");
    EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 1}));
    EXPECT_EQ(b.get().ranks, (std::vector<int>{0, 1}));
  }
}

TEST(RollCallTest, OneThatWasLeftBehindAndWakesUpIsNotWaitedFor) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 3);
  auto third = member(store, 2, 3);
  auto a = call(*first, "a");
  EXPECT_EQ(call(*third, "c").get().ranks, (std::vector<int>{0, 2}));
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 2}));
  third.reset();
  const auto second = member(store, 1, 3);
  auto again = call(*first, "a");
  EXPECT_EQ(again.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  EXPECT_NE(store->get_to_str("1/alive").find('1'), std::string::npos) << "it answers";
  EXPECT_EQ(again.get().ranks, (std::vector<int>{0}));
}

TEST(RollCallTest, OneWhoseStoreWasLateOnceAnswersLater) {
  const auto store = c10::make_intrusive<FrozenStore>();
  const std::chrono::seconds timeout(1);
  RollCall first(store, 0, 2, timeout);
  RollCall second(store, 1, 2, timeout);
  store->freeze(true);
  std::this_thread::sleep_for(milliseconds(2500));  // a call of each thread is over its limit
  store->freeze(false);
  auto a = call(first, "a");
  // Longer than a rank that is gone is waited for.
  EXPECT_EQ(a.wait_for(milliseconds(2500)), std::future_status::timeout);
  auto b = call(second, "b");
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(b.get().ranks, (std::vector<int>{0, 1}));
}

// Another call would have a list of its own: both ranks would go on, each alone.
TEST(RollCallTest, ACallThatALateStoreHasFailedIsTheSameWhenItIsMadeAgain) {
  const auto store = c10::make_intrusive<FrozenStore>();
  const std::chrono::seconds timeout(1);
  const auto first = std::make_unique<RollCall>(store, 0, 2, timeout);
  RollCall late(store, 1, 2, timeout);
  store->freeze(true);
  expect_words(error_of([&] { late.call("b"); }), {"did not answer within"});
  EXPECT_EQ(late.calls(), 0);
  store->freeze(false);
  auto a = call(*first, "a");
  auto b = call(late, "b");
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(b.get().ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(late.calls(), 1);
  EXPECT_EQ(first->calls(), 1);
}

TEST(RollCallTest, ARankThatTheOthersLeftWhileItsCallFailedLearnsIt) {
  const auto store = c10::make_intrusive<FrozenStore>();
  const auto first = std::make_unique<RollCall>(store, 0, 2, std::chrono::seconds(30));
  auto late = std::make_unique<RollCall>(store, 1, 2, std::chrono::seconds(1));
  store->freeze(true);
  expect_words(error_of([&] { late->call("b"); }), {"did not answer within"});
  store->freeze(false);
  // As of a process that is stopped: its thread does not answer, either.
  store->set("0/list", std::vector<uint8_t>{'0', ' '});
  EXPECT_EQ(first->call("a").ranks, (std::vector<int>{0}));
  expect_words(error_of([&] { late->call("b"); }), {"the other ranks went on without rank 1"});
}

TEST(RollCallTest, EndsWithinTwoSecondsWhereTheStoreIsSilent) {
  const auto store = c10::make_intrusive<FrozenStore>();
  auto roll = std::make_unique<RollCall>(store, 0, 1, std::chrono::seconds(30));
  store->freeze(true);
  std::this_thread::sleep_for(milliseconds(400));  // its thread asks
  error_within(milliseconds(1500), [&] { roll.reset(); });
  store->freeze(false);
}

TEST(RollCallTest, AStoreThatIsLateKnowsOfNoneThatIsLost) {
  const auto store = c10::make_intrusive<FrozenStore>();
  RollCall roll(store, 0, 2, std::chrono::seconds(5));
  store->freeze(true);
  EXPECT_EQ(error_within(milliseconds(1000), [&] { EXPECT_FALSE(roll.lost_one_of({0, 1})); }), "");
  store->freeze(false);
}

TEST(RollCallTest, OneThatWakesUpLaterIsRefusedForGood) {
  const StorePtr store = new_store();
  const auto first = member(store, 1, 2);
  EXPECT_EQ(first->call("a").ranks, (std::vector<int>{1}));
  auto second = member(store, 0, 2);
  for (int i = 0; i < 3; ++i) {
    expect_words(error_of([&] { second->call("b"); }),
                 {"the other ranks went on without rank 0", "as 1 rank", "end this process"});
  }
  EXPECT_FALSE(store->check({"1/bell"})) << "it writes nothing for a later call";
  second.reset();
  EXPECT_FALSE(store->check({"ended"})) << "the other goes on";
}

TEST(RollCallTest, OnlyAnOrderlyEndOfTheLowestRankEndsTheJob) {
  const StorePtr store = new_store();
  error_of([&] {
    const auto first = member(store, 0, 2);
    TORCH_CHECK(false, "no more sugar");
  });
  EXPECT_FALSE(store->check({"ended"})) << "an error ended it";
  member(store, 1, 2).reset();
  EXPECT_FALSE(store->check({"ended"})) << "rank 0 may go on";
  member(store, 0, 2).reset();
  EXPECT_TRUE(store->check({"ended"}));
}

std::unique_ptr<RollCall> newcomer(const StorePtr& store, int number,
                                   milliseconds timeout = std::chrono::seconds(30)) {
  return std::make_unique<RollCall>(store, number, number + 1, timeout, /*joins=*/true);
}

std::future<RollCall::Present> join(RollCall& roll, const std::string& text) {
  return std::async(std::launch::async, [&roll, text] { return roll.join(text); });
}

// Bounded by the timeout of what joins.
void wait_until_seen(const RollCall& roll, const std::vector<int>& numbers) {
  for (int i = 0; i < 500 && roll.waiting() != numbers; ++i) {
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_EQ(roll.waiting(), numbers);
}

TEST(RollCallTest, ThoseThatJoinAreSeenAndOnTheNextList) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 2);
  const auto second = member(store, 1, 2);
  EXPECT_TRUE(first->waiting().empty());
  const auto third = newcomer(store, 5);
  const auto fourth = newcomer(store, 2);
  auto c = join(*third, "c");
  auto d = join(*fourth, "d");
  wait_until_seen(*first, {2, 5});
  wait_until_seen(*second, {2, 5});
  EXPECT_EQ(c.wait_for(milliseconds(0)), std::future_status::timeout) << "nobody has called yet";
  auto a = call(*first, "a");
  auto b = call(*second, "b");
  for (auto* present : {&a, &b, &c, &d}) {
    const RollCall::Present list = present->get();
    EXPECT_EQ(list.ranks, (std::vector<int>{0, 1, 2, 5}));
    EXPECT_EQ(list.texts, (std::vector<std::string>{"a", "b", "d", "c"}));
  }
  EXPECT_TRUE(first->waiting().empty());
  // From then on they are ranks like the others.
  for (RollCall* roll : {first.get(), second.get(), third.get(), fourth.get()}) {
    EXPECT_EQ(roll->calls(), 1);
    EXPECT_EQ(roll->ranks(), (std::vector<int>{0, 1, 2, 5}));
  }
  std::vector<std::future<RollCall::Present>> again;
  for (RollCall* roll : {third.get(), first.get(), fourth.get(), second.get()}) {
    again.push_back(call(*roll, "again"));
  }
  for (auto& present : again) EXPECT_EQ(present.get().ranks, (std::vector<int>{0, 1, 2, 5}));
}

TEST(RollCallTest, OneThatJoinsAfterTheListWasClosedIsOnTheNext) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 2);
  EXPECT_EQ(first->call("a").ranks, (std::vector<int>{0}));
  const auto third = newcomer(store, 2);
  auto c = join(*third, "c");
  wait_until_seen(*first, {2});
  EXPECT_EQ(first->call("a").ranks, (std::vector<int>{0, 2}));
  EXPECT_EQ(c.get().ranks, (std::vector<int>{0, 2}));
  EXPECT_EQ(third->calls(), 2);
}

// Of a second optimizer, which the process makes after the first.
TEST(RollCallTest, OneThatHasJoinedAnotherRollIsWaitedForOnce) {
  const auto store = BoundedStore::of(new_store(), std::chrono::seconds(30));
  const auto first = member(store->under("g"), 0, 1);
  const auto second = std::make_unique<RollCall>(store->under("d"), 0, 1, milliseconds(500));
  const auto other = std::make_unique<RollCall>(store->under("e"), 0, 1, milliseconds(500));
  const auto late = member(store->under("f"), 0, 1);
  EXPECT_FALSE(second->expects_newcomers());
  const auto third = newcomer(store->under("g"), 1);
  auto joined = join(*third, "c");
  wait_until_seen(*first, {1});
  EXPECT_EQ(first->call("a").ranks, (std::vector<int>{0, 1}));
  joined.get();
  EXPECT_FALSE(first->expects_newcomers());
  EXPECT_TRUE(second->expects_newcomers());
  auto a = call(*second, "a");
  EXPECT_EQ(a.wait_for(milliseconds(1500)), std::future_status::timeout);
  const auto fourth = newcomer(store->under("d"), 1);
  auto c = join(*fourth, "c");
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(c.get().ranks, (std::vector<int>{0, 1}));
  EXPECT_FALSE(second->expects_newcomers());

  // One that never comes is given up, and one that has ended is not waited for.
  EXPECT_EQ(call(*other, "a").get().ranks, std::vector<int>{0});
  EXPECT_FALSE(other->expects_newcomers());
  add_ended_rank(*store, 1);
  auto alone = call(*late, "a");
  EXPECT_EQ(alone.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  EXPECT_FALSE(member(store->under("g"), 0, 1)->expects_newcomers()) << "it was made later";
}

// A process that is killed while it waits leaves its number in the store.
TEST(RollCallTest, OneThatIsKilledWhileItWaitsIsOnNoList) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 1);
  const std::string number = "7 ";
  store->append("0/joining", {number.begin(), number.end()});
  store->add("0/beat/7", 3);
  store->set("0/bell", std::vector<uint8_t>{'1'});
  std::this_thread::sleep_for(milliseconds(800));
  EXPECT_TRUE(first->waiting().empty());
  EXPECT_EQ(first->call("a").ranks, (std::vector<int>{0}));
}

TEST(RollCallTest, OneThatJoinsAJobOfWhichNobodyIsLeftLearnsIt) {
  for (const bool has_begun : {true, false}) {
    const StorePtr store = new_store();
    const auto bounded = BoundedStore::of(store, milliseconds(5000));
    if (has_begun) store->set("ranks", std::vector<uint8_t>{'2'});
    add_ended_rank(*bounded, 0);
    const auto late = newcomer(store, 2, std::chrono::seconds(20));
    auto c = join(*late, "c");
    EXPECT_EQ(c.wait_for(milliseconds(500)), std::future_status::timeout) << "rank 1 runs";
    add_ended_rank(*bounded, 1);
    expect_words(error_of([&] { c.get(); }), {"process 2 cannot join", "all its ranks have ended"});
  }
}

TEST(RollCallTest, AStoreThatIsSilentIsAnErrorThatNamesTheProcessThatJoins) {
  const auto store = c10::make_intrusive<FrozenStore>();
  const auto late = newcomer(store, 2, milliseconds(300));
  store->freeze(true);
  expect_words(error_of([&] { late->join(""); }),
               {"process 2 cannot join the job: the store did not answer", "start the job again"});
  store->freeze(false);
}

TEST(RollCallTest, WhoCannotJoinLearnsWhy) {
  const StorePtr store = new_store();
  expect_words(error_of([&] { newcomer(store, 2, milliseconds(300))->join(""); }),
               {"process 2 cannot join", "waited 300 ms", "protect()", "InitOptions::timeout"});
  auto first = member(store, 0, 2);
  expect_words(error_of([&] { newcomer(store, 1)->join(""); }), {"at least 2", "got 1"});
  expect_words(error_of([&] { newcomer(store, 2, milliseconds(300))->join(""); }),
               {"process 2 cannot join", "to call recover()"});
  expect_words(error_of([&] { newcomer(store, 2)->join(""); }),
               {"no other process has joined", "got 2", "greater"});
  const auto late = newcomer(store, 3);
  auto c = join(*late, "c");
  wait_until_seen(*first, {3});
  first.reset();
  expect_words(error_of([&] { c.get(); }), {"process 3 cannot join", "has ended"});
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 6); }
