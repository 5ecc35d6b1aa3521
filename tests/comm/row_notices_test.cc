// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Notices between two ranks, here of one process, which maps its own memory a second time.
#include "zero/comm/backends/row_notices.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "zero/comm/backends/shared_memory.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Kind = RowNotices::Kind;

// The two sides of a pair.
class RowNoticesTest : public testing::Test {
 protected:
  void SetUp() override {
    memory_ = SharedMemory::instance();
    ASSERT_NE(memory_, nullptr);
    peer_ = PeerMemory::open(memory_->address());
    ASSERT_NE(peer_, nullptr);
    sender_ = RowNotices::make(memory_);
    receiver_ = RowNotices::make(memory_);
    ASSERT_TRUE(sender_->connect(peer_, receiver_->address()));
    ASSERT_TRUE(receiver_->connect(peer_, sender_->address()));
  }

  std::shared_ptr<SharedMemory> memory_;
  std::shared_ptr<PeerMemory> peer_;
  std::unique_ptr<RowNotices> sender_, receiver_;
};

TEST_F(RowNoticesTest, RowsAreFoundByTagInTheirOrder) {
  EXPECT_FALSE(receiver_->find(7));
  EXPECT_EQ(sender_->announce(7, 4096, 10), 0u);
  EXPECT_EQ(sender_->announce(8, 8192, 20), 1u);
  EXPECT_EQ(sender_->announce(7, 12288, 30), 2u);
  const std::optional<RowNotices::Row> eight = receiver_->find(8), first = receiver_->find(7),
                                       second = receiver_->find(7);
  ASSERT_TRUE(eight && first && second);
  EXPECT_EQ(eight->number, 1u);
  EXPECT_EQ(eight->offset, 8192);
  EXPECT_EQ(eight->bytes, 20);
  EXPECT_EQ(first->number, 0u);
  EXPECT_EQ(second->number, 2u);
  EXPECT_FALSE(receiver_->find(7));
  EXPECT_FALSE(sender_->find(7));
}

TEST_F(RowNoticesTest, ASlotIsUsedAgainOnceItsRowIsTaken) {
  // Several times round, the last row of each taken first.
  for (uint64_t round = 0; round < 3; ++round) {
    for (uint64_t n = 0; n < RowNotices::kSlots; ++n) {
      ASSERT_TRUE(sender_->has_slot());
      sender_->announce(static_cast<int>(n), static_cast<int64_t>(n), 1);
    }
    EXPECT_FALSE(sender_->has_slot());
    for (uint64_t n = RowNotices::kSlots; n-- > 0;) {
      const auto row = receiver_->find(static_cast<int>(n));
      ASSERT_TRUE(row);
      EXPECT_EQ(row->number, round * RowNotices::kSlots + n);
      EXPECT_EQ(row->offset, static_cast<int64_t>(n));
      EXPECT_FALSE(sender_->is_taken(row->number));
      EXPECT_FALSE(sender_->has_slot());
      receiver_->take(row->number);
      EXPECT_TRUE(sender_->is_taken(row->number));
    }
    EXPECT_TRUE(sender_->has_slot());
  }
}

TEST_F(RowNoticesTest, EachKindOfNoticeEndsItsOwnWaits) {
  const uint32_t announced = receiver_->count(Kind::kAnnounced);
  const uint32_t taken = sender_->count(Kind::kTaken);
  const auto begin = Clock::now();
  std::thread waits([&] {
    while (receiver_->count(Kind::kAnnounced) == announced) {
      receiver_->wait(Kind::kAnnounced, announced, std::chrono::seconds(20));
    }
    receiver_->take(receiver_->find(7)->number);
  });
  std::this_thread::sleep_for(milliseconds(20));
  const uint64_t number = sender_->announce(7, 0, 1);
  while (sender_->count(Kind::kTaken) == taken) {
    sender_->wait(Kind::kTaken, taken, std::chrono::seconds(20));
  }
  EXPECT_TRUE(sender_->is_taken(number));
  waits.join();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
  EXPECT_EQ(sender_->count(Kind::kAnnounced), 0u);
}

TEST_F(RowNoticesTest, AWaitEndsAtItsLimitAndAtWake) {
  const auto begin = Clock::now();
  receiver_->wait(Kind::kAnnounced, receiver_->count(Kind::kAnnounced), milliseconds(30));
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
  std::atomic<bool> stop{false};
  std::thread waits([&] {
    while (!stop) {
      receiver_->wait(Kind::kTaken, receiver_->count(Kind::kTaken), std::chrono::seconds(20));
    }
  });
  std::this_thread::sleep_for(milliseconds(20));
  stop = true;
  // A thread that has not yet begun to wait misses one.
  std::atomic<bool> ended{false};
  std::thread wakes([&] {
    while (!ended) {
      receiver_->wake();
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  waits.join();
  ended = true;
  wakes.join();
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
}

TEST_F(RowNoticesTest, WhatWasSaidOutlivesTheOneWhoSaidIt) {
  const uint64_t number = sender_->announce(7, 4096, 10);
  receiver_->take(receiver_->find(7)->number);
  sender_->announce(8, 8192, 20);
  EXPECT_FALSE(sender_->is_closed());
  receiver_.reset();
  EXPECT_TRUE(sender_->is_closed());
  // Other rows may take freed memory, and their bytes must not be read as notices.
  std::vector<at::Tensor> others;
  for (int i = 0; i < 4; ++i) {
    others.push_back(memory_->allocate(1 << 20));
    others.back().fill_(255);
  }
  EXPECT_TRUE(sender_->is_taken(number));
  EXPECT_FALSE(sender_->is_taken(number + 1));
  EXPECT_FALSE(sender_->find(7));
}

// As when the peer has been killed.
TEST_F(RowNoticesTest, NothingIsFoundInMemoryThatWasGivenBack) {
  sender_->announce(7, 4096, 10);
  receiver_->take(receiver_->find(7)->number);
  sender_->announce(7, 8192, 10);
  EXPECT_FALSE(receiver_->is_closed());
  peer_->give_back();
  EXPECT_TRUE(receiver_->is_closed());
  for (const int tag : {7, 0}) EXPECT_FALSE(receiver_->find(tag)) << tag;
  EXPECT_FALSE(sender_->is_taken(0));
}

// Memory of pairs of which both sides are gone is used again.
TEST_F(RowNoticesTest, MemoryIsFreedOnceBothSidesAreGone) {
  int64_t highest = 0;
  for (int i = 0; i < 100; ++i) {
    std::unique_ptr<RowNotices> one = RowNotices::make(memory_), other = RowNotices::make(memory_);
    ASSERT_TRUE(one->connect(peer_, other->address()));
    ASSERT_TRUE(other->connect(peer_, one->address()));
    if (i % 2 == 0) std::swap(one, other);
    highest = std::max(highest, one->address().offset);
  }
  EXPECT_LT(highest, 20 * (int64_t{1} << 18));
}

TEST_F(RowNoticesTest, AChildOfTheProcessDoesNotCloseThem) {
  const pid_t child = fork();
  if (child == 0) {
    sender_.reset();
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(receiver_->is_closed());
  sender_.reset();
  EXPECT_TRUE(receiver_->is_closed());
}

}  // namespace
}  // namespace zero
