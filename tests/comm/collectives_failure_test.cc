// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a Communicator says when a rank is missing, ends, aborts or is slow.

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <future>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/transports.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Keeps a rank there, calling nothing, until the others have seen what they wait for.
class Bystander {
 public:
  explicit Bystander(int others) : left_(others) {}
  void done() { --left_; }
  void stand_by() const {
    const auto limit = Clock::now() + std::chrono::seconds(10);
    while (left_ > 0 && Clock::now() < limit) std::this_thread::sleep_for(milliseconds(5));
  }

 private:
  std::atomic<int> left_;
};

// Long enough for a loaded machine to bring everybody else, short enough to wait for.
constexpr milliseconds kMissed{1500};

class FailureTest : public ::testing::TestWithParam<Wire> {};

INSTANTIATE_TEST_SUITE_P(Wires, FailureTest,
                         ::testing::Values(Wire::kMemory, Wire::kGloo, Wire::kShared),
                         [](const auto& info) { return wire_name(info.param); });

// Rank 2 of 4 comes to a first operation and to no other.
void expect_rank_2_named(Wire wire, const std::string& operation, int64_t n) {
  Bystander absent(3);
  const auto body = [&](const Group& group) {
    const auto data = data_of(group);
    at::Tensor rows = at::zeros({4, n});
    at::Tensor received = at::zeros({4, n});
    at::Tensor flags = at::zeros({n}, at::kInt);
    data->gather_rows(rows, "warm-up").wait();
    if (group.rank() == 2) {
      absent.stand_by();
      return;
    }
    const auto start = Clock::now();
    const std::string text = error_of([&] {
      Pending pending = operation == "exchange_rows" ? data->exchange_rows(rows, received, "b 3")
                        : operation == "gather_rows" ? data->gather_rows(rows, "b 3")
                                                     : data->all_reduce_max(flags, "b 3");
      pending.wait();
    });
    EXPECT_LT(Clock::now() - start, kMissed + std::chrono::seconds(1));
    expect_words(text, {operation + " of b 3: rank 2 did not send within 1500 ms",
                        "this is rank " + std::to_string(group.rank()) + " of 4", "\"test/data\""});
    EXPECT_EQ(data->failed(), text);
    const std::string later = error_of([&] { data->gather_rows(rows, "b 4"); });
    expect_words(later, {"gather_rows of b 4: refused", "rank 2 did not send"});
    absent.done();
  };
  run_ranks(4, body, on(wire, kMissed));
}

// All at once: what takes time is waiting.
TEST_P(FailureTest, ARankThatNeverCallsIsNamedInTime) {
  std::vector<std::future<void>> runs;
  const auto start = [&](const std::string& operation, int64_t n) {
    runs.push_back(std::async(std::launch::async, expect_rank_2_named, GetParam(), operation, n));
  };
  start("exchange_rows", 10);
  start("exchange_rows", 500000);
  start("gather_rows", 10);
  start("all_reduce_max", 10);
  for (std::future<void>& run : runs) run.get();
}

// As in replays of a CUDA graph, while which no operation waits.
TEST_P(FailureTest, AConnectionThatEndsIsNoticedWithoutAWait) {
  Bystander ends(2);
  run_ranks(
      3,
      [&](const Group& group) {
        const auto data = data_of(group);
        at::Tensor rows = at::zeros({3, 10});
        data->gather_rows(rows, "warm-up").wait();
        if (group.rank() == 2) {
          data->abort("this rank gives up");
          return ends.stand_by();
        }
        RowCommunicator(*data).watch_peers();
        const auto limit = Clock::now() + std::chrono::seconds(10);
        while (data->failed().empty() && Clock::now() < limit) {
          std::this_thread::sleep_for(milliseconds(5));
        }
        expect_words(data->failed(), {"lost rank", "rank 2", " of 3"});
        ends.done();
      },
      on(GetParam()));
}

// The rank's communicator goes away with an operation under way, as when its body throws.
TEST_P(FailureTest, ARankThatEndsIsNoticedLongBeforeTheTimeout) {
  run_ranks(
      4,
      [](const Group& group) {
        auto data = data_of(group);
        at::Tensor rows = at::zeros({4, 10});
        at::Tensor some = at::zeros({5});
        data->gather_rows(rows, "warm-up").wait();
        const auto start = Clock::now();
        if (group.rank() == 2) {
          const Pending never_waited_for = data->broadcast(some, 0, "parameters");
          data.reset();
        } else {
          const std::string text = error_of([&] { data->gather_rows(rows, "b 3").wait(); });
          expect_words(text, {"gather_rows of b 3: ", "rank 2"});
          EXPECT_FALSE(data->failed().empty());
        }
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
      },
      on(GetParam(), std::chrono::seconds(20)));
}

// Gloo does not end the wait for a message of which a part has moved.
TEST_P(FailureTest, AbortEndsATransferInItsMiddle) {
  for (const std::string operation : {"exchange_rows", "gather_rows", "broadcast"}) {
    for (const int life : {10, 21, 32, 43}) {
      const auto body = [&](const Group& group) {
        const auto data = data_of(group);
        const at::Tensor rows = at::zeros({2, 2 << 20}), received = at::zeros({2, 2 << 20});
        std::thread aborter([&] {
          std::this_thread::sleep_for(milliseconds(life));
          data->abort("aborted on purpose");
        });
        const auto start = Clock::now();
        const std::string text = error_of([&] {
          while (true) {
            Pending pending = operation == "exchange_rows"
                                  ? data->exchange_rows(rows, received, "b")
                              : operation == "gather_rows" ? data->gather_rows(rows, "b")
                                                           : data->broadcast(rows, 0, "b");
            pending.wait();
          }
        });
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(10)) << text;
        aborter.join();
      };
      run_ranks(2, body, on(GetParam(), std::chrono::seconds(20)));
    }
  }
}

// Gloo waits for the next turn of its event loop, 10 ms for each connection that a thread of ours
// closes.
TEST(ConnectionsTest, AllOfACommunicatorEndAtOnce) {
  constexpr int kWorld = 24;
  constexpr milliseconds kOneByOne = (kWorld - 1) * milliseconds(10);
  for (const bool fails : {true, false}) {
    Clock::duration least = kOneByOne;  // of a few, for a busy machine
    for (int tries = 0; tries < 3; ++tries) {
      std::barrier<> all(kWorld);
      run_ranks(
          kWorld,
          [&](const Group& group) {
            auto data = data_of(group);
            all.arrive_and_wait();
            if (group.rank() == 0) {
              const auto start = Clock::now();
              fails ? data->abort("on purpose") : data.reset();
              least = std::min(least, Clock::now() - start);
            }
            all.arrive_and_wait();
          },
          on(Wire::kGloo));
    }
    EXPECT_LT(least, kOneByOne / 2) << "fails: " << fails;
  }
}

TEST_P(FailureTest, AnOperationThatNobodyWaitedForIsAFailure) {
  run_ranks(
      2,
      [](const Group& group) {
        const auto data = data_of(group);
        at::Tensor rows = at::zeros({2, 10});
        // The other rank may have closed the connections before.
        error_of([&] { data->gather_rows(rows, "dropped"); });
        expect_words(error_of([&] { data->gather_rows(rows, "next").wait(); }), {"dropped"});
      },
      on(GetParam(), std::chrono::seconds(10)));
}

TEST_P(FailureTest, AFailingRankEndsTheRun) {
  const auto start = Clock::now();
  try {
    run_ranks(
        3,
        [](const Group& group) {
          if (group.rank() == 1) throw std::runtime_error("this one");
          const auto data = data_of(group);  // Would wait for rank 1.
          data->gather_rows(at::zeros({3, 1}), "b").wait();
        },
        on(GetParam()));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "this one");
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
}

// ---- Faults that only our own transport can make ----

TEST(MemoryNetworkTest, ADelayIsWaitedOut) {
  const RunOptions options = on(Wire::kMemory);
  options.network->delay(1, MemoryOp::kSend, milliseconds(200));
  const auto start = Clock::now();
  run_ranks(
      2,
      [](const Group& group) {
        const auto data = data_of(group);
        at::Tensor rows = at::full({2, 4}, group.rank(), at::kFloat);
        data->gather_rows(rows, "b").wait();
        EXPECT_EQ(rows[1][0].item<float>(), 1);
      },
      options);
  EXPECT_GE(Clock::now() - start, milliseconds(200));
  EXPECT_EQ(options.network->counts(0).calls_of(MemoryOp::kSend), 1);
  EXPECT_EQ(options.network->counts(0).bytes_of(MemoryOp::kSend), 16);
}

// What the other thread uses ends with the communicator: the exchange, and what the action holds.
TEST(ConnectionsTest, ADestructorWaitsForAFailureThatAnotherThreadReports) {
  std::latch over(2);
  run_ranks(
      2,
      [&](const Group& group) {
        auto data = group.make_communicator("data", Purpose::kData);
        if (group.rank() == 1) {  // sends nothing, and is there
          over.arrive_and_wait();
          return;
        }
        std::atomic<bool> former = false, reports = false, reported = false;
        data->on_failure([&](const std::string&) { former = true; });
        data->on_failure([&](const std::string&) {
          reports = true;
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          reported = true;
        });
        const at::Tensor rows = at::zeros({2, 300});
        Pending pending = data->gather_rows(rows, "rows");
        std::thread other([&] { expect_words(error_of([&] { pending.wait(); }), {"rank 1"}); });
        while (!reports) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        data.reset();
        EXPECT_TRUE(reported);
        other.join();
        EXPECT_FALSE(former) << "an action that another one replaced";
        over.arrive_and_wait();
      },
      {.timeout = std::chrono::milliseconds(500)});
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 4); }
