// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a group remembers of its operations, and whom they name, with transfers that do as the test
// says.
#include "zero/comm/exchange/operation.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "zero/comm/backends/connection_watch.h"
#include "zero/comm/exchange/row_exchange.h"
#include "zero/comm/row_communicator.h"
#include "zero/errors.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// One that does `at_wait` when it is waited for.
class GivenWork : public c10d::Work {
 public:
  explicit GivenWork(std::function<void(milliseconds limit)> at_wait)
      : at_wait_(std::move(at_wait)) {}
  bool wait(milliseconds limit) override {
    at_wait_(limit);
    return true;
  }

 private:
  const std::function<void(milliseconds)> at_wait_;
};

// One that nothing but abort() ends, at any time.
class EndlessWork : public c10d::Work {
 public:
  bool wait(milliseconds limit) override {
    std::unique_lock<std::mutex> lock(mutex_);
    waits_ = true;
    changed_.notify_all();
    TORCH_CHECK(changed_.wait_for(lock, limit, [&] { return aborted_; }), "timed out");
    return false;
  }
  void abort() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }
  bool aborted() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return aborted_;
  }
  void until_it_waits() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return waits_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool waits_ = false;
  bool aborted_ = false;
};

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Log = std::vector<std::string>;

WorkPtr done() {
  return c10::make_intrusive<GivenWork>([](milliseconds) {});
}
WorkPtr logged(Log& log, const std::string& name) {
  return c10::make_intrusive<GivenWork>([&log, name](milliseconds) { log.push_back(name); });
}
WorkPtr broken() {
  return c10::make_intrusive<GivenWork>(
      [](milliseconds) { TORCH_CHECK(false, "connection reset\nand a backtrace"); });
}
// One whose data does not come.
WorkPtr late() {
  return c10::make_intrusive<GivenWork>([](milliseconds limit) {
    std::this_thread::sleep_for(limit);
    TORCH_CHECK(false, "timed out");
  });
}

std::shared_ptr<GroupHealth> health_of(milliseconds timeout = std::chrono::seconds(10)) {
  return std::make_shared<GroupHealth>(1, 4, "test", timeout);
}

TEST(GroupHealthTest, ALostConnectionNamesItsRankAndWhatElseIsMissing) {
  const auto health = health_of();
  Log log;
  Operation operation(health, "gather_rows of x");
  operation.add_receive(0, done());
  operation.add_receive(2, broken());
  operation.add_receive(3, late());
  operation.add_send(3, logged(log, "send"));
  const std::string text = error_of([&] { operation.wait(); });
  expect_words(text, {"gather_rows of x: lost rank 2: connection reset (after ",
                      "of at most 10000 ms); rank 3 did not send so far",
                      "(this is rank 1 of 4 in group \"test\")", "has the reason in its output"});
  EXPECT_EQ(text.find("backtrace"), std::string::npos);
  EXPECT_TRUE(log.empty());
  EXPECT_EQ(health->first_failure(), text);
}

TEST(GroupHealthTest, RanksThatDoNotSendInTimeAreAllNamed) {
  const auto start = std::chrono::steady_clock::now();
  Operation operation(health_of(milliseconds(50)), "exchange");
  operation.add_receive(3, late());
  operation.add_receive(0, late());
  operation.add_receive(2, done());
  expect_words(error_of([&] { operation.wait(); }),
               {"exchange: ranks 0, 3 did not send within 50 ms", "raise the group's timeout"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(GroupHealthTest, ARankThatTakesNothingIsNamedForThat) {
  Operation operation(health_of(milliseconds(20)), "exchange");
  operation.add_receive(2, done());
  operation.add_send(2, late());
  expect_words(error_of([&] { operation.wait(); }), {"rank 2 did not take its data within 20 ms"});
}

TEST(GroupHealthTest, ATransferThatIsDroppedIsAFailureOfTheGroup) {
  for (const bool cancelled : {false, true}) {
    const auto health = health_of();
    {
      Operation operation(health, "exchange");
      EXPECT_EQ(health->operations_under_way(), 1);
      operation.add_receive(0, done());
      if (cancelled) {
        const auto no_memory = std::make_exception_ptr(std::bad_alloc());
        error_of([&] { operation.fail_to_start(no_memory); });
      }
    }
    EXPECT_EQ(health->operations_under_way(), 0);
    if (cancelled) {
      expect_words(health->first_failure(), {"exchange: could not start: ", "bad_alloc"});
    } else {
      expect_words(health->first_failure(), {"exchange: dropped without being waited for"});
    }
  }
}

TEST(GroupHealthTest, TheFirstFailureIsKeptAndEveryLaterOperationRefused) {
  const auto health = health_of();
  Log log;
  health->on_first_failure([&](const std::string& message) { log.push_back(message); });
  health->check("broadcast");
  health->fail("first");
  health->fail("second");
  EXPECT_EQ(health->first_failure(), "first");
  EXPECT_EQ(log, Log{"first"});
  expect_words(error_of([&] { health->check("broadcast"); }),
               {"broadcast: refused, because the group failed before: first"});
  Operation operation(health, "exchange");
  operation.add_receive(0, logged(log, "received"));
  expect_words(error_of([&] { operation.wait(); }), {"exchange: refused"});
  EXPECT_EQ(log, Log{"first"});
  error_of([&] { operation.fail_to_start(std::make_exception_ptr(std::bad_alloc())); });
}

TEST(GroupHealthTest, AFailureEndsTheWaitsOfOtherThreads) {
  const auto health = health_of();
  const auto work = c10::make_intrusive<EndlessWork>();
  Operation operation(health, "exchange");
  operation.add_receive(2, work);
  std::thread other([&] {
    work->until_it_waits();
    health->fail("another operation broke");
  });
  expect_words(error_of([&] { operation.wait(); }),
               {"exchange: lost rank 2: aborted", "failed before: another operation broke"});
  other.join();
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(health->wait(*c10::make_intrusive<EndlessWork>(), 2, std::chrono::seconds(10)));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(GroupHealthTest, ALongWaitEndsAtTheSecondLookAfterItsConnectionHas) {
  const auto health = health_of();
  std::atomic<int> ended{-1};
  health->ask_for_ended([&](int rank) { return rank == ended; });
  const auto work = c10::make_intrusive<EndlessWork>();
  Operation operation(health, "exchange");
  operation.add_receive(2, work);
  std::thread other([&] {
    work->until_it_waits();
    for (const int rank : {-1, 3}) {
      ended = rank;
      for (int look = 0; look < 3; ++look) health->look_at_waits();
    }
    EXPECT_FALSE(work->aborted()) << "the connection to rank 2 is there";
    ended = 2;
    health->look_at_waits();
    EXPECT_FALSE(work->aborted()) << "the row may have arrived just before";
    health->look_at_waits();
  });
  expect_words(error_of([&] { operation.wait(); }),
               {"exchange: lost rank 2: its connection has ended"});
  other.join();
}

TEST(GroupHealthTest, AWaitOverItsLimitIsEnded) {
  // A transport that measures its limit by a clock that is set back.
  class Work : public EndlessWork {
   public:
    bool wait(milliseconds /*limit*/) override { return EndlessWork::wait(std::chrono::hours(1)); }
  };
  const auto health = health_of();
  const auto work = c10::make_intrusive<Work>();
  std::thread other([&] {
    work->until_it_waits();
    health->look_at_waits();
    EXPECT_FALSE(work->aborted()) << "its transport may still say more";
    while (!work->aborted()) {
      std::this_thread::sleep_for(milliseconds(20));
      health->look_at_waits();
    }
  });
  EXPECT_FALSE(health->wait(*work, 2, milliseconds(300)));
  other.join();
}

// So what an action uses may end after that call.
TEST(GroupHealthTest, ForgettingActionsWaitsForOneThatRuns) {
  const auto health = health_of();
  std::atomic<bool> runs{false}, ended{false};
  health->on_first_failure([&](const std::string&) {
    runs = true;
    std::this_thread::sleep_for(milliseconds(300));
    ended = true;
  });
  std::thread other([&] { health->fail("a peer died"); });
  while (!runs) std::this_thread::yield();
  health->forget_actions();
  EXPECT_TRUE(ended);
  other.join();
}

TEST(GroupHealthTest, ForgottenActionsAreNotCalled) {
  const auto health = health_of();
  int calls = 0;
  health->on_first_failure([&](const std::string&) { ++calls; });
  health->hang_up_with([&] { ++calls; });
  health->ask_for_ended([&](int) { return ++calls > 0; });
  health->forget_actions();
  EXPECT_TRUE(health->ended_peers().empty());
  health->fail("a peer died");
  EXPECT_EQ(calls, 0);
}

TEST(GroupHealthTest, WaitsEndBeforeConnectionsAreClosed) {
  const auto health = health_of();
  const auto work = c10::make_intrusive<EndlessWork>();
  bool aborted_before = false;
  health->on_first_failure([&](const std::string&) { EXPECT_FALSE(work->aborted()); });
  health->hang_up_with([&] { aborted_before = work->aborted(); });
  std::thread other([&] {
    work->until_it_waits();
    health->fail("a peer died");
  });
  EXPECT_FALSE(health->wait(*work, 2, std::chrono::seconds(10)));
  other.join();
  EXPECT_TRUE(aborted_before);
}

TEST(GroupHealthTest, NothingMayWaitWithoutALimit) {
  expect_words(error_of([] { const GroupHealth health(0, 2, "test", milliseconds(0)); }),
               {"expected a timeout above 0 ms", "rank 0 of 2"});
}

// A transport whose transfers throw when they are to start.
class RefusingBackend : public c10d::Backend {
 public:
  explicit RefusingBackend(std::function<void()> refuse)
      : Backend(0, 2), refuse_(std::move(refuse)) {}
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int, int) override {
    refuse_();
    return nullptr;
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override {
    refuse_();
    return nullptr;
  }

 private:
  const std::function<void()> refuse_;
};

TEST(GroupHealthTest, ARankThatLacksMemoryForATransferBlamesNoOther) {
  for (const bool full : {true, false}) {
    const auto backend = c10::make_intrusive<RefusingBackend>([=] {
      if (full) at::empty({int64_t{1} << 60}, at::kByte);
      throw std::runtime_error("Socket closed");
    });
    const auto communicator = RowCommunicator::over(
        make_row_exchange(backend, RowTransport::kPairwise, milliseconds(1000)), 0, 2, "test",
        milliseconds(1000));
    try {
      communicator->all_reduce_max(at::zeros({1}, at::kLong), "a maximum").wait();
      ADD_FAILURE() << "expected an error";
    } catch (const c10::OutOfMemoryError& error) {
      EXPECT_TRUE(full);
      EXPECT_EQ(std::string(error.what_without_backtrace()).find("lost rank"), std::string::npos)
          << error.what_without_backtrace();
    } catch (const c10::Error& error) {
      EXPECT_FALSE(full) << error.what_without_backtrace();
      EXPECT_NE(dynamic_cast<const CommunicationError*>(&error), nullptr);
      expect_words(error.what_without_backtrace(), {"lost rank 1", "Socket closed"});
    }
  }
}

TEST(ConnectionWatchTest, FullMemoryIsNoEndOfAConnection) {
  std::mutex calls;
  RefusingBackend full([] { throw std::bad_alloc(); });
  EXPECT_FALSE(ConnectionWatch(full, calls, 1, milliseconds(100)).has_ended(1));
  RefusingBackend full_of_tensors([] { at::empty({int64_t{1} << 60}, at::kByte); });
  EXPECT_FALSE(ConnectionWatch(full_of_tensors, calls, 1, milliseconds(100)).has_ended(1));
  RefusingBackend closed([] { throw std::runtime_error("Socket closed"); });
  EXPECT_TRUE(ConnectionWatch(closed, calls, 1, milliseconds(100)).has_ended(1));
}

}  // namespace
}  // namespace zero
