// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The same contract of every RowExchange for operations that are under way: several at once, the
// time for which their rows are there, and how they fail.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/comm/row_exchange_ranks.h"
#include "tests/support/error_of.h"
#include "tests/support/transports.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

TEST_P(RowExchangeTest, ManyAtOnceStartedHereAndWaitedForThere) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    constexpr int kOperations = 40;
    std::vector<at::Tensor> rows;
    std::vector<Pending> pending;
    for (int i = 0; i < kOperations; ++i) {
      rows.push_back(at::zeros({world, 100}));
      rows.back().select(0, group.rank()).fill_(100 * i + group.rank());
    }
    std::promise<void> started;
    std::thread waiter([&, ready = started.get_future()]() mutable {
      ready.wait();
      for (int i = kOperations / 2; i-- > 0;) pending[static_cast<size_t>(i)].wait();
    });
    pending.reserve(kOperations);
    for (int i = 0; i < kOperations; ++i) {
      pending.push_back(data->gather_rows(rows[static_cast<size_t>(i)], "bucket"));
      if (i == kOperations / 2) started.set_value();
    }
    waiter.join();
    for (int i = kOperations / 2; i < kOperations; ++i) pending[static_cast<size_t>(i)].wait();
    for (int i = 0; i < kOperations; ++i) {
      for (int from = 0; from < world; ++from) {
        EXPECT_EQ(rows[static_cast<size_t>(i)][from][99].item<float>(), 100 * i + from);
      }
    }
  });
}

TEST_P(RowExchangeTest, TwoReductionsAreUnderWayAtOnce) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    std::vector<at::Tensor> rows;
    std::vector<at::Tensor> buffers;
    std::vector<float> sums(2, 0.0F);
    std::vector<Pending> pending;
    for (int i = 0; i < 2; ++i) {
      rows.push_back(at::full({world, 300}, 10 * i + group.rank(), at::kFloat));
      buffers.push_back(at::empty({RowCommunicator(*data).reduction_bytes(rows[i])}, at::kByte));
      const auto use = [&sums, i](const SummandRows& summands) {
        sums[i] = serial_sum(copies_of(summands, 300)).max().item<float>();
      };
      pending.push_back(RowCommunicator(*data).reduce_rows(rows[i], buffers[i], use, "bucket"));
    }
    for (Pending& one : pending) one.wait();
    EXPECT_EQ(sums[0], world * (world - 1) / 2);
    EXPECT_EQ(sums[1], 10 * world + world * (world - 1) / 2);
  });
}

// The elements of the row of rank `from` for rank `to` in round `round`.
float value_of(int from, int to, int round) {
  return static_cast<float>(100 * round + 10 * from + to);
}

// Each rank overwrites its rows as soon as it may, while the others are slow to use them.
TEST_P(RowExchangeTest, RowsOfAReductionAreThereUntilTheyAreUsed) {
  if (GetParam().two_level()) GTEST_SKIP() << "see two_level_exchange_test";
  const bool shared = GetParam().wire == Wire::kShared;
  run([shared](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    // Rows in shared memory are read where they are, others are copied there first.
    const at::Tensor allocated = RowCommunicator(*data).allocate(world * 300 * 2);
    for (at::Tensor rows :
         {allocated.defined() ? allocated.view(at::kHalf).view({world, 300}) : at::Tensor(),
          at::empty({world, 300}, at::kHalf)}) {
      if (!rows.defined()) continue;
      for (int round = 0; round < 4; ++round) {
        for (int to = 0; to < world; ++to) rows.select(0, to).fill_(value_of(me, to, round));
        std::vector<at::Tensor> received(world, at::Tensor());
        const at::Tensor buffer =
            at::empty({RowCommunicator(*data).reduction_bytes(rows)}, at::kByte);
        const auto use = [&](const SummandRows& summands) {
          EXPECT_EQ(summands.addresses != nullptr, shared && world > 1);
          if (me == round % world) std::this_thread::sleep_for(milliseconds(20));
          received = copies_of(summands, 300);
        };
        // A rank may also receive rows that others read in place.
        if (shared && round == 3 && me == 0) {
          at::Tensor into = at::zeros({world, 300}, at::kHalf);
          data->exchange_rows(rows, into, "bucket").wait();
          into.select(0, me).copy_(rows.select(0, me));
          received = into.unbind(0);
        } else {
          RowCommunicator(*data).reduce_rows(rows, buffer, use, "bucket").wait();
        }
        rows.fill_(-1.0F);
        ASSERT_EQ(static_cast<int>(received.size()), world);
        for (int from = 0; from < world; ++from) {
          EXPECT_EQ(received[from].min().item<float>(), value_of(from, me, round));
          EXPECT_EQ(received[from].max().item<float>(), value_of(from, me, round));
        }
      }
    }
  });
}

// A sender must not depend on when the others wait: rank 1 waits for nothing before rank 0 is done.
TEST_P(RowExchangeTest, RowsAreTakenFromARankThatOthersDoNotWaitForYet) {
  if (GetParam().world_size != 2 || GetParam().wire == Wire::kNative) GTEST_SKIP();
  std::promise<void> done;
  const std::shared_future<void> first_is_done = done.get_future().share();
  run([&](const Group& group) {
    const auto data = data_of(group);
    at::Tensor rows = at::full({2, 300}, group.rank(), at::kFloat);
    Pending pending = data->gather_rows(rows, "bucket");
    if (group.rank() == 1) {
      EXPECT_EQ(first_is_done.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    }
    pending.wait();
    if (group.rank() == 0) done.set_value();
    EXPECT_EQ(rows[0][299].item<float>(), 0);
    EXPECT_EQ(rows[1][299].item<float>(), 1);
  });
}

void wait_for(Communicator& data, const std::string& call, const std::string& label) {
  const int64_t world = data.world_size();
  at::Tensor rows = at::ones({world, 500});
  if (call == "exchange_rows") data.exchange_rows(rows, at::zeros_like(rows), label).wait();
  if (call == "reduce_rows") reduced_rows(data, rows, label);
  if (call == "gather_rows") data.gather_rows(rows, label).wait();
  if (call == "all_reduce_max") data.all_reduce_max(at::zeros({5}, at::kInt), label).wait();
}

TEST_P(RowExchangeTest, APeerThatDiesIsNamed) {
  const int world = GetParam().world_size;
  if (world == 1) return;
  // Two calls at each number of ranks, the others at the next.
  const std::vector<std::string> calls = {"exchange_rows", "all_reduce_max", "gather_rows",
                                          "reduce_rows"};
  for (const std::string& call : {calls[world / 2 % 2], calls[2 + world / 2 % 2]}) {
    std::atomic<int> named = 0;
    std::vector<std::string> texts(static_cast<size_t>(world));
    run(
        [&](const Group& group) {
          auto data = data_of(group);
          wait_for(*data, call, "warm-up");
          if (group.rank() == world - 1) return;  // Its connections end with it.
          const std::string text = error_of([&] { wait_for(*data, call, "b 3"); });
          expect_words(text, {call + " of b 3: ", "this is rank " + std::to_string(group.rank()) +
                                                      " of " + std::to_string(world)});
          if (text.find("rank " + std::to_string(world - 1)) != std::string::npos) ++named;
          texts[group.rank()] = text;
          EXPECT_EQ(data->failed(), text);
          expect_words(error_of([&] { wait_for(*data, call, "b 4"); }),
                       {call + " of b 4: refused", "the group failed before"});
        },
        std::chrono::seconds(20));
    // In two levels a rank may first lose one that has lost it, and a backend with collectives of
    // its own numbers the ranks of its level.
    const bool own_numbers = GetParam().two_level() && GetParam().wire == Wire::kNative;
    EXPECT_GE(named, own_numbers              ? 0
                     : GetParam().two_level() ? 1
                                              : world - 1)
        << c10::Join("\n", texts);
  }
}

TEST_P(RowExchangeTest, AnErrorInTheUseOfRowsEndsTheGroup) {
  if (GetParam().world_size == 1) return;
  // A rank that fails first ends the group, which others may see first.
  std::atomic<int> with_reason = 0;
  run([&](const Group& group) {
    const auto data = data_of(group);
    const at::Tensor rows = at::ones({group.world_size(), 300});
    const at::Tensor buffer = at::empty({RowCommunicator(*data).reduction_bytes(rows)}, at::kByte);
    const auto use = [](const SummandRows&) { TORCH_CHECK(false, "no room for the sum"); };
    const std::string text =
        error_of([&] { RowCommunicator(*data).reduce_rows(rows, buffer, use, "b").wait(); });
    expect_words(text, {"reduce_rows of b: "});
    if (text.find("no room for the sum") != std::string::npos) ++with_reason;
    EXPECT_EQ(data->failed(), text);
  });
  EXPECT_GE(with_reason, 1);
}

}  // namespace
}  // namespace zero
