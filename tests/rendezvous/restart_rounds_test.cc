// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/rendezvous/job.h: which round of a job a process takes part in.
#include "zero/rendezvous/job.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdint>
#include <future>
#include <string>

#include "tests/support/error_of.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

Environment process(int rank, int world_size = 2) {
  Environment env;
  env.rank = rank;
  env.world_size = world_size;
  env.agent_serves_store = true;
  return env;
}

class RoundsTest : public ::testing::Test {
 protected:
  int64_t enter(const Environment& env, const std::string& own, int64_t after = 0,
                milliseconds limit = std::chrono::seconds(30)) {
    return enter_restart_round(*store_, env, own, after, Clock::now() + limit);
  }
  std::future<int64_t> entering(const Environment& env, const std::string& own) {
    return std::async(std::launch::async, [this, env, own] { return enter(env, own); });
  }

  const c10::intrusive_ptr<BoundedStore> store_ =
      BoundedStore::of(c10::make_intrusive<c10d::HashStore>(), std::chrono::seconds(30));
};

TEST_F(RoundsTest, AStoreOfARankAndOneThatIsClaimedHaveNone) {
  Environment env = process(0);
  EXPECT_TRUE(has_restart_rounds(*store_, env));
  env.joins = true;
  EXPECT_FALSE(has_restart_rounds(*store_, env));
  env = process(0);
  env.agent_serves_store = false;
  EXPECT_FALSE(has_restart_rounds(*store_, env));
  claim_for_job(*store_->under(prefix_of_restart_round(0)), "", 2);
  EXPECT_FALSE(has_restart_rounds(*store_, process(0)));
}

TEST_F(RoundsTest, EachProcessOfRank0BeginsOneAndTheOthersFindIt) {
  for (int64_t round = 1; round < 4; ++round) {
    // Whether it comes first or last.
    auto early = entering(process(1), "early in round " + std::to_string(round));
    EXPECT_EQ(early.wait_for(milliseconds(100)), std::future_status::timeout);
    EXPECT_EQ(enter(process(0), "0"), round);
    EXPECT_EQ(early.get(), round);
    EXPECT_FALSE(is_over(*store_, round));
    EXPECT_TRUE(is_over(*store_, round - 1));
  }
}

TEST_F(RoundsTest, OneOfAnotherSizeIsOfOtherProcesses) {
  EXPECT_EQ(enter(process(0, 3), "0"), 1);
  auto second = entering(process(1), "a");
  EXPECT_EQ(second.wait_for(milliseconds(100)), std::future_status::timeout);
  EXPECT_EQ(enter(process(0), "0"), 2);
  EXPECT_EQ(second.get(), 2);
}

TEST_F(RoundsTest, WhoWaitsInVainLearnsWhy) {
  const auto wait = [&] { enter(process(1), "a", 0, milliseconds(200)); };
  expect_words(error_of(wait), {"rank 0", "a round of 2 ranks", "there is none"});
  enter(process(0, 3), "0");
  expect_words(error_of(wait), {"the last one has 3 ranks"});
  enter(process(0), "0");
  enter(process(1), "process 7 on a\n1");
  expect_words(error_of(wait), {"rank 1 of the last one was process 7 on a"});
}

}  // namespace
}  // namespace zero
