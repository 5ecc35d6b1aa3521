// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/recovery/roll_call.h: who is on the list, who is waited for, and who was left behind.
#include "zero/recovery/roll_call.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"

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

TEST(RollCallTest, OneThatComputesIsWaitedFor) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 2);
  const auto second = member(store, 1, 2);
  auto a = call(*first, "a");
  // Longer than a rank that is gone is waited for.
  EXPECT_EQ(a.wait_for(milliseconds(2500)), std::future_status::timeout);
  auto b = call(*second, "b");
  EXPECT_EQ(a.get().ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(b.get().ranks, (std::vector<int>{0, 1}));
}

TEST(RollCallTest, OneThatWakesUpLaterIsRefusedForGood) {
  const StorePtr store = new_store();
  const auto first = member(store, 0, 2);
  EXPECT_EQ(first->call("a").ranks, (std::vector<int>{0}));
  const auto second = member(store, 1, 2);
  for (int i = 0; i < 3; ++i) {
    expect_words(error_of([&] { second->call("b"); }),
                 {"the other ranks went on without rank 1", "as 1 rank", "end this process"});
  }
  EXPECT_EQ(second->calls(), 1) << "it writes nothing for a later call";
}

}  // namespace
}  // namespace zero
