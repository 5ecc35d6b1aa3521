// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a Communicator moves and counts.

#include "zero/communicator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/transports.h"
#include "zero/comm/backends/shared_memory.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// Element i of what rank `from` has for rank `to`. Exact in 16 bits.
at::Tensor values(int from, int to, int64_t n, at::ScalarType dtype) {
  return at::arange(n, at::kFloat).remainder(8).add_(8 * from + 64 * to).to(dtype);
}

struct Case {
  Wire wire;
  int world_size;
};

class CollectivesTest : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(const Group&)>& body) {
    run_ranks(GetParam().world_size, body, on(GetParam().wire));
  }
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return wire_name(info.param.wire) + std::to_string(info.param.world_size);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Wire wire : {Wire::kMemory, Wire::kNative, Wire::kGloo, Wire::kShared}) {
    for (int world_size = 1; world_size <= 4; ++world_size) all.push_back({wire, world_size});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Wires, CollectivesTest, ::testing::ValuesIn(cases()), case_name);

TEST_P(CollectivesTest, ExchangeAndGatherInEveryDtype) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int64_t n : {1, 7, 1000, 70001}) {
        at::Tensor rows = at::empty({world, n}, dtype);
        for (int to = 0; to < world; ++to) rows.select(0, to).copy_(values(me, to, n, dtype));
        const at::Tensor before = rows.clone();
        at::Tensor received = at::zeros({world, n}, dtype);
        data->exchange_rows(rows, received, "bucket").wait();
        EXPECT_TRUE(rows.equal(before));
        for (int from = 0; from < world; ++from) {
          if (from == me) continue;
          EXPECT_TRUE(received.select(0, from).equal(values(from, me, n, dtype)));
        }
        at::Tensor full = at::zeros({world, n}, dtype);
        full.select(0, me).copy_(values(me, 3, n, dtype));
        data->gather_rows(full, "bucket").wait();
        for (int from = 0; from < world; ++from) {
          EXPECT_TRUE(full.select(0, from).equal(values(from, 3, n, dtype)));
        }
      }
    }
  });
}

TEST_P(CollectivesTest, SmallOperations) {
  run([](const Group& group) {
    const auto control = group.make_communicator("control", Purpose::kControl);
    const int world = group.world_size();
    const int me = group.rank();
    at::Tensor sum = at::full({3}, me + 0.5, at::kDouble);
    at::Tensor longs = at::full({2}, (int64_t{1} << 40) + me, at::kLong);
    at::Tensor ints = at::full({2}, 10 - me, at::kInt);
    at::Tensor sent = at::full({2, 3}, me, at::kBFloat16);
    Pending first = control->all_reduce_sum(sum, "norm");
    Pending second = control->all_reduce_max(longs, "control");
    Pending third = control->all_reduce_max(ints, "control");
    Pending fourth = control->broadcast(sent, world - 1, "parameters");
    // In any order, since each is an operation of its own.
    fourth.wait();
    second.wait();
    third.wait();
    first.wait();
    EXPECT_EQ(sum[2].item<double>(), world * (world - 1) / 2 + 0.5 * world);
    EXPECT_EQ(longs[1].item<int64_t>(), (int64_t{1} << 40) + world - 1);
    EXPECT_EQ(ints[0].item<int>(), 10);
    EXPECT_EQ(sent[1][2].item<float>(), world - 1);
    std::vector<std::string> expected;
    for (int rank = 0; rank < world; ++rank) {
      expected.push_back(std::string(static_cast<size_t>(rank * 5), static_cast<char>('a' + rank)));
    }
    EXPECT_EQ(control->all_gather_text(expected[static_cast<size_t>(me)], "names"), expected);
    EXPECT_EQ(control->all_gather_text("", "nothing"),
              std::vector<std::string>(static_cast<size_t>(world)));
  });
}

TEST_P(CollectivesTest, NothingIsAlsoSomethingToSend) {
  run([](const Group& group) {
    const auto data = data_of(group);
    at::Tensor none = at::empty({group.world_size(), 0});
    at::Tensor other = at::empty({group.world_size(), 0});
    data->exchange_rows(none, other, "empty").wait();
    data->gather_rows(none, "empty").wait();
    data->broadcast(none, 0, "empty").wait();
    EXPECT_EQ(data->traffic().exchange_bytes_sent, 0);
  });
}

TEST_P(CollectivesTest, TrafficIsWhatLeavesTheRank) {
  const bool whole = GetParam().wire == Wire::kNative;
  run([whole](const Group& group) {
    const auto data = data_of(group);
    const int64_t world = group.world_size();
    at::Tensor rows = at::zeros({world, 10}, at::kBFloat16);
    at::Tensor received = at::zeros({world, 10}, at::kBFloat16);
    for (int i = 0; i < 3; ++i) data->exchange_rows(rows, received, "bucket").wait();
    data->gather_rows(rows, "bucket").wait();
    data->all_reduce_sum(at::zeros({4}, at::kDouble), "norm").wait();
    data->broadcast(rows, 0, "parameters").wait();
    const Traffic traffic = data->traffic();
    const int64_t calls = world == 1 ? 0 : 1;
    EXPECT_EQ(traffic.exchange_calls, 3 * calls);
    EXPECT_EQ(traffic.exchange_bytes_sent, 3 * (world - 1) * 10 * 2);
    EXPECT_EQ(traffic.gather_calls, calls);
    EXPECT_EQ(traffic.gather_bytes_sent, (world - 1) * 10 * 2);
    EXPECT_EQ(traffic.small_calls, 2 * calls);
    const int64_t reduced = whole ? 2 * (world - 1) * 32 / world : (world - 1) * 32;
    const int64_t sent = group.rank() == 0 ? (world - 1) * world * 10 * 2 : 0;
    EXPECT_EQ(traffic.small_bytes_sent, reduced + sent);
  });
}

TEST_P(CollectivesTest, ManyAtOnceStartedHereAndWaitedForThere) {
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

TEST_P(CollectivesTest, NativeReduceScatterIsForFp32) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    at::Tensor rows = at::full({world, 5}, group.rank() + 1.0F, at::kFloat);
    at::Tensor row = at::zeros({5});
    EXPECT_FALSE(data->has_native_reduce_scatter(at::kBFloat16));
    if (world > 1 && !data->has_native_reduce_scatter(at::kFloat)) {
      expect_words(error_of([&] { data->reduce_scatter_rows(rows, row, "bucket"); }),
                   {"exchange_rows"});
      EXPECT_TRUE(data->failed().empty());  // Nothing was sent, so nothing is broken.
      return;
    }
    data->reduce_scatter_rows(rows, row, "bucket").wait();
    EXPECT_EQ(row[4].item<float>(), world * (world + 1) / 2);
  });
}

TEST_P(CollectivesTest, WrongArgumentsAreRefusedAndBreakNothing) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int64_t world = group.world_size();
    const at::Tensor rows = at::zeros({world, 4});
    const at::Tensor other = at::zeros({world, 4});
    expect_words(error_of([&] {
                   data->gather_rows(at::zeros({world + 1, 4}), "b");
                 }),
                 {"world_size"});
    expect_words(error_of([&] {
                   data->gather_rows(at::zeros({world, 4, 1}), "b");
                 }),
                 {"contiguous"});
    expect_words(error_of([&] { data->gather_rows(at::Tensor(), "b"); }), {"undefined"});
    expect_words(error_of([&] { data->exchange_rows(rows, rows, "b"); }), {"share memory"});
    expect_words(error_of([&] { data->exchange_rows(rows, other.to(at::kHalf), "b"); }), {"dtype"});
    expect_words(error_of([&] { data->all_reduce_sum(at::zeros({1}), "b"); }), {"double"});
    expect_words(error_of([&] { data->all_reduce_max(at::zeros({1}), "b"); }), {"NaN"});
    expect_words(error_of([&] { data->broadcast(rows, static_cast<int>(world), "b"); }),
                 {"source"});
    data->gather_rows(rows, "b").wait();
  });
}

// ---- Memory that ranks share ----

// What rank `from` has for rank `to` in round `round`.
float value_of(int from, int to, int round) {
  return static_cast<float>(100 * round + 10 * from + to);
}

// Each rank overwrites its rows as soon as it may, while the others are slow to read them.
TEST_P(CollectivesTest, RowsReadInPlaceAreThereUntilTheyAreUsed) {
  const bool shared = GetParam().wire == Wire::kShared;
  run([shared](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    const bool in_place = data->reads_in_place(at::zeros({world, 300}));
    EXPECT_EQ(in_place, shared && world > 1);
    if (!in_place) {
      expect_words(error_of([&] {
                     data->exchange_in_place(
                         at::zeros({world, 4}), [](auto) {}, "bucket");
                   }),
                   {"use exchange_rows"});
      return;
    }
    EXPECT_FALSE(data->reads_in_place(at::zeros({world, 0})));
    // Rows in shared memory are read where they are, others are copied there first.
    const at::Tensor allocated = data->allocate(world * 300 * 4);
    ASSERT_TRUE(allocated.defined());
    for (at::Tensor rows :
         {allocated.view(at::kFloat).view({world, 300}), at::empty({world, 300})}) {
      for (int round = 0; round < 4; ++round) {
        for (int to = 0; to < world; ++to) rows.select(0, to).fill_(value_of(me, to, round));
        at::Tensor received = at::zeros({world, 300});
        const auto use = [&](c10::ArrayRef<const void*> addresses) {
          ASSERT_EQ(static_cast<int>(addresses.size()), world);
          if (me == round % world) std::this_thread::sleep_for(milliseconds(20));
          for (int from = 0; from < world; ++from) {
            std::memcpy(received[from].mutable_data_ptr(), addresses[from], 300 * sizeof(float));
          }
        };
        // A rank may also copy while others read in place.
        Pending pending = round == 3 && me == 0 ? data->exchange_rows(rows, received, "bucket")
                                                : data->exchange_in_place(rows, use, "bucket");
        pending.wait();
        rows.fill_(-1.0F);
        for (int from = 0; from < world; ++from) {
          if (from == me && round == 3) continue;
          EXPECT_EQ(received[from].min().item<float>(), value_of(from, me, round));
          EXPECT_EQ(received[from].max().item<float>(), value_of(from, me, round));
        }
      }
    }
  });
}

// Exchanges and gathers rows whose values tell where they come from.
void expect_rows_arrive(Communicator& data) {
  const int world = data.world_size();
  const int me = data.rank();
  at::Tensor rows = at::empty({world, 70000});
  for (int to = 0; to < world; ++to) rows.select(0, to).fill_(value_of(me, to, 0));
  at::Tensor received = at::zeros({world, 70000});
  data.exchange_rows(rows, received, "bucket").wait();
  data.gather_rows(rows, "bucket").wait();
  for (int from = 0; from < world; ++from) {
    EXPECT_EQ(rows[from][69999].item<float>(), value_of(from, from, 0));
    if (from == me) continue;
    EXPECT_EQ(received[from][0].item<float>(), value_of(from, me, 0));
  }
}

TEST(CommunicatorTest, OneRankMaySendWhereOthersShare) {
  RunOptions options = on(Wire::kShared);
  options.unwilling = 1;
  run_ranks(
      3,
      [](const Group& group) {
        const auto data = data_of(group);
        EXPECT_FALSE(data->reads_in_place(at::empty({3, 70000})));
        EXPECT_EQ(data->allocate(1).defined(), group.rank() != 1);
        expect_rows_arrive(*data);
      },
      options);
}

// With shared memory used up, rows are told to follow as messages.
TEST(CommunicatorTest, RowsTravelWithoutRoomInSharedMemory) {
  const auto memory = SharedMemory::instance();
  ASSERT_TRUE(memory);
  std::vector<at::Tensor> all;  // of it, and untouched
  for (int64_t bytes = memory->address().bytes; bytes >= 4096; bytes /= 2) {
    for (at::Tensor block = memory->allocate(bytes); block.defined();) {
      all.push_back(block);
      block = memory->allocate(bytes);
    }
  }
  run_ranks(
      3,
      [](const Group& group) {
        const auto data = data_of(group);
        const int me = group.rank();
        expect_rows_arrive(*data);
        at::Tensor rows = at::empty({3, 70000});
        for (int to = 0; to < 3; ++to) rows.select(0, to).fill_(value_of(me, to, 0));
        double sum = 0;
        const auto use = [&](c10::ArrayRef<const void*> addresses) {
          for (const void* row : addresses) sum += static_cast<const float*>(row)[69999];
        };
        data->exchange_in_place(rows, use, "bucket").wait();
        EXPECT_EQ(sum, value_of(0, me, 0) + value_of(1, me, 0) + value_of(2, me, 0));
      },
      on(Wire::kShared));
}

// A sender must not depend on when the others wait: rank 1 waits for nothing before rank 0 is done.
TEST_P(CollectivesTest, RowsAreTakenFromARankThatOthersDoNotWaitForYet) {
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

TEST(CommunicatorTest, OneRankNeedsNoBackend) {
  Communicator alone(nullptr, "alone", milliseconds(1));
  EXPECT_EQ(alone.rank(), 0);
  EXPECT_EQ(alone.world_size(), 1);
  Pending pending = alone.gather_rows(at::zeros({1, 3}), "bucket");
  EXPECT_TRUE(pending.valid());
  pending.wait();
  EXPECT_FALSE(pending.valid());
  EXPECT_THROW(Communicator(nullptr, "no limit", milliseconds(0)), c10::Error);
}

TEST(SimulatedTest, ThousandsOfRanksInOneThread) {
  const Group group = simulated_group(4096, 17);
  const auto data = data_of(group);
  at::Tensor rows = at::full({4096, 3}, 2.0F, at::kFloat);
  at::Tensor received = at::full({4096, 3}, 5.0F, at::kFloat);
  data->exchange_rows(rows, received, "b").wait();
  data->gather_rows(rows, "b").wait();
  EXPECT_EQ(data->traffic().exchange_bytes_sent, 4095 * 12);
  EXPECT_EQ(data->traffic().gather_bytes_sent, 4095 * 12);
  EXPECT_EQ(received.min().item<float>(), 5.0F);
  EXPECT_TRUE(data->has_native_reduce_scatter(at::kFloat));
  EXPECT_FALSE(data->has_native_reduce_scatter(at::kBFloat16));
  at::Tensor row = at::zeros({3});
  rows.select(0, 17).fill_(9.0F);
  data->reduce_scatter_rows(rows, row, "b").wait();
  EXPECT_EQ(row.min().item<float>(), 9.0F);
  EXPECT_EQ(data->all_gather_text("plan", "b"), std::vector<std::string>(4096, "plan"));
}

}  // namespace
}  // namespace zero
