// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Holds every RowExchange to its contract (zero/comm/exchange/row_exchange.h), over every
// transport, at 1, 2, 3 and 4 ranks of one machine and in two levels: through a Communicator, which
// chooses the exchange by its transport and topology.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/comm/row_exchange_ranks.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/transports.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// The row of rank `from` for rank `to`. Exact in 16 bits.
at::Tensor values(int from, int to, int64_t n, at::ScalarType dtype) {
  return at::arange(n, at::kFloat).remainder(8).add_(8 * from + 64 * to).to(dtype);
}

// Of rows. Only bytes are sent, so that two dtypes do with short ones.
std::vector<int64_t> lengths(at::ScalarType dtype) {
  if (dtype == at::kHalf || dtype == at::kInt) return {7};
  return {1, 1000, 70001};
}

TEST_P(RowExchangeTest, ExchangeAndGatherInEveryDtype) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kInt}) {
      for (const int64_t n : lengths(dtype)) {
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

// The row of rank `from` for rank `to`, with values that round in every sum.
at::Tensor fractions(int from, int to, int64_t n, at::ScalarType dtype) {
  return random_tensor({n}, 10 * from + to).to(dtype);
}

// In rank order within each machine, then in the order of machines.
std::vector<at::Tensor> sums_of_machines(const std::vector<at::Tensor>& rows, int machines) {
  std::vector<at::Tensor> sums;
  const auto local = static_cast<int64_t>(rows.size()) / machines;
  for (auto begin = rows.begin(); begin != rows.end(); begin += local) {
    sums.push_back(serial_sum({begin, begin + local}));
  }
  return sums;
}

TEST_P(RowExchangeTest, ReducedRowsAddUpToTheSumInRankOrder) {
  const bool whole = GetParam().wire == Wire::kNative;
  const int machines = GetParam().two_level() ? GetParam().machines() : 0;
  run([whole, machines](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int64_t n : lengths(dtype)) {
        at::Tensor rows = at::empty({world, n}, dtype);
        for (int to = 0; to < world; ++to) rows.select(0, to).copy_(fractions(me, to, n, dtype));
        const at::Tensor before = rows.clone();
        const std::vector<at::Tensor> brought = reduced_rows(*data, rows, "bucket");
        EXPECT_TRUE(rows.equal(before));
        std::vector<at::Tensor> sent;
        for (int from = 0; from < world; ++from) sent.push_back(fractions(from, me, n, dtype));
        if (machines > 0) {
          EXPECT_EQ(brought.size(), whole ? 1U : machines);
          sent = sums_of_machines(sent, machines);
        }
        const at::Tensor sum = serial_sum(brought);
        if (whole &&
            (machines > 0 || dtype == at::kFloat)) {  // The backend has an order of its own.
          EXPECT_EQ(brought.size(), 1U);
          EXPECT_TRUE(sum.allclose(serial_sum(sent), 1e-6, 1e-6));
        } else {
          EXPECT_TRUE(sum.equal(serial_sum(sent))) << dtype << " " << n;
        }
      }
    }
  });
}

// As those of a wire format whose values an exchange cannot add.
TEST_P(RowExchangeTest, ReducedBytesArriveAsTheyWereSent) {
  if (GetParam().two_level()) GTEST_SKIP() << "see two_level_exchange_test";
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    for (const int64_t n : {1, 7, 70001}) {
      const auto sent = [n](int from, int to) {
        return at::arange(n, at::kLong).add_(50 * from + 3 * to).remainder(256).to(at::kByte);
      };
      at::Tensor rows = at::empty({world, n}, at::kByte);
      for (int to = 0; to < world; ++to) rows.select(0, to).copy_(sent(me, to));
      const std::vector<at::Tensor> brought = reduced_rows(*data, rows, "bucket");
      ASSERT_EQ(static_cast<int>(brought.size()), world);
      for (int from = 0; from < world; ++from) EXPECT_TRUE(brought[from].equal(sent(from, me)));
    }
  });
}

// By the memory that a reduction needs, which bounds the buffers of a backward pass.
// The own row of some ranks is empty, and of others long enough for shared memory.
TEST_P(RowExchangeTest, RowsOfDifferentLengths) {
  if (GetParam().two_level()) GTEST_SKIP() << "rows of different lengths have one level";
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    const std::vector<std::vector<int64_t>> all_lengths = {
        {0, 7, 70001, 0}, {48, 1, 0, 16}, {33000, 0, 0, 0}};
    for (const std::vector<int64_t>& lengths : all_lengths) {
      std::vector<int64_t> ends;
      for (int r = 0; r < world; ++r) ends.push_back((r == 0 ? 0 : ends.back()) + lengths[r]);
      if (ends.back() == 0) continue;
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const Rows rows(at::empty({ends.back()}, dtype), BucketRows(ends));
        for (int to = 0; to < world; ++to) {
          rows.row(to).copy_(fractions(me, to, lengths[to], dtype));
        }
        const at::Tensor before = rows.values().clone();
        const Traffic start = data->traffic();
        const std::vector<at::Tensor> brought = reduced_rows(*data, rows, "bucket");
        EXPECT_TRUE(rows.values().equal(before));
        EXPECT_EQ(brought.empty(), lengths[me] == 0);
        if (!brought.empty()) {
          std::vector<at::Tensor> sent;
          for (int from = 0; from < world; ++from) {
            sent.push_back(fractions(from, me, lengths[me], dtype));
          }
          EXPECT_TRUE(serial_sum(brought).equal(serial_sum(sent))) << dtype << " " << lengths[me];
        }

        const Rows gathered(at::full({ends.back()}, 99, dtype), BucketRows(ends));
        gathered.row(me).copy_(values(me, me, lengths[me], dtype));
        RowCommunicator(*data).gather_rows(gathered, "bucket").wait();
        for (int r = 0; r < world; ++r) {
          EXPECT_TRUE(gathered.row(r).equal(values(r, r, lengths[r], dtype))) << dtype << " " << r;
        }
        const Traffic traffic = data->traffic();
        const auto element = static_cast<int64_t>(c10::elementSize(dtype));
        const int64_t all = ends.back() * element, own = lengths[me] * element;
        EXPECT_EQ(traffic.exchange_bytes_sent - start.exchange_bytes_sent, all - own);
        EXPECT_EQ(traffic.gather_bytes_sent - start.gather_bytes_sent, (world - 1) * own);
      }
    }
  });
}

// A wait for one broadcast of a section, and for one of an open section, is an error of the
// network.
TEST(WholeExchangeTest, RowsOfDifferentLengthsAreGatheredInOneSection) {
  for (const bool sections : {true, false}) {
    for (const std::vector<int64_t>& lengths :
         {std::vector<int64_t>{5, 0, 3}, {0, 4, 0}, {1, 2, 70001}}) {
      const RunOptions options = on(Wire::kNative);
      if (!sections) options.network->leave_out_sections();
      const BucketRows ends(
          {lengths[0], lengths[0] + lengths[1], lengths[0] + lengths[1] + lengths[2]});
      run_ranks(
          3,
          [&](const Group& group) {
            const auto data = data_of(group);
            const int me = group.rank();
            const Rows rows(at::zeros({ends.total()}, at::kBFloat16), ends);
            rows.row(me).copy_(values(me, me, lengths[me], at::kBFloat16));
            RowCommunicator(*data).gather_rows(rows, "bucket").wait();
            for (int r = 0; r < 3; ++r) {
              EXPECT_TRUE(rows.row(r).equal(values(r, r, lengths[r], at::kBFloat16))) << r;
            }
          },
          options);
      const auto filled = static_cast<int64_t>(ends.filled().size());
      for (int r = 0; r < 3; ++r) {
        const auto counts = options.network->counts(r);
        EXPECT_EQ(counts.calls_of(MemoryOp::kBroadcast), filled);
        EXPECT_EQ(counts.calls_of(MemoryOp::kSection), sections && filled > 1 ? 1 : 0);
      }
      EXPECT_EQ(options.network->open_sections(), 0);
    }
  }
}

TEST(WholeExchangeTest, AnErrorWithinASectionEndsIt) {
  const RunOptions options = on(Wire::kNative, std::chrono::seconds(20));
  options.network->kill_at(1, MemoryOp::kBroadcast, 2);
  run_ranks(
      3,
      [](const Group& group) {
        const auto data = data_of(group);
        const Rows rows(at::zeros({6}), BucketRows({1, 3, 6}));
        expect_words(error_of([&] { RowCommunicator(*data).gather_rows(rows, "bucket").wait(); }),
                     {"rank 1"});
      },
      options);
  EXPECT_EQ(options.network->open_sections(), 0);
}

TEST_P(RowExchangeTest, TheTransportChoosesTheExchange) {
  if (GetParam().two_level()) GTEST_SKIP() << "see two_level_exchange_test";
  run([](const Group& group) {
    const auto data = data_of(group);
    const int64_t world = group.world_size();
    const int64_t own = world == 1 ? 0 : 12;
    const Wire wire = GetParam().wire;
    const int64_t floats = wire == Wire::kShared ? 0 : wire == Wire::kNative ? own : world * own;
    EXPECT_EQ(RowCommunicator(*data).reduction_bytes(at::zeros({world, 3})), floats);
    EXPECT_EQ(RowCommunicator(*data).reduction_bytes(at::zeros({world, 6}, at::kBFloat16)),
              wire == Wire::kShared ? 0 : world * own);
    EXPECT_EQ(RowCommunicator(*data).allocate(100).defined(), wire == Wire::kShared && world > 1);
  });
}

TEST_P(RowExchangeTest, NothingIsAlsoSomethingToSend) {
  run([](const Group& group) {
    const auto data = data_of(group);
    at::Tensor none = at::empty({group.world_size(), 0});
    at::Tensor other = at::empty({group.world_size(), 0});
    data->exchange_rows(none, other, "empty").wait();
    data->gather_rows(none, "empty").wait();
    data->broadcast(none, 0, "empty").wait();
    data->all_reduce_sum(at::empty({0}, at::kDouble), "empty").wait();
    EXPECT_EQ(RowCommunicator(*data).reduction_bytes(none), 0);
    EXPECT_TRUE(reduced_rows(*data, none, "empty").empty());
    EXPECT_EQ(data->traffic().exchange_bytes_sent, 0);
  });
}

TEST_P(RowExchangeTest, FewValuesAndBroadcasts) {
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
  });
}

// A thread of the library takes the first level, and the wait may be outside of the mode.
TEST_P(RowExchangeTest, TensorsOfInferenceModeAreWrittenTo) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int64_t world = group.world_size();
    at::Tensor values, rows, sent, received, last;
    std::vector<Pending> pending;
    {
      const c10::InferenceMode mode;
      values = at::full({2}, group.rank(), at::kDouble);
      rows = at::full({world, 3}, group.rank(), at::kFloat);
      sent = at::full({world, 3}, group.rank(), at::kFloat);
      received = at::zeros({world, 3});
      last = at::full({3}, group.rank(), at::kFloat);
      pending.push_back(data->all_reduce_sum(values, "values"));
      pending.push_back(data->gather_rows(rows, "rows"));
      pending.push_back(data->exchange_rows(sent, received, "exchange"));
      pending.push_back(data->broadcast(last, static_cast<int>(world) - 1, "last"));
    }
    for (Pending& each : pending) each.wait();
    EXPECT_EQ(values[1].item<double>(), world * (world - 1) / 2);
    received = received.clone();
    received.select(0, group.rank()).fill_(group.rank());  // the own one is unspecified
    for (const at::Tensor& each : {rows, received}) {
      EXPECT_TRUE(each.select(1, 2).eq(at::arange(world)).all().item<bool>()) << each;
    }
    EXPECT_TRUE(last.eq(world - 1).all().item<bool>()) << last;
  });
}

// More than 8 ranks combine their values in steps.
TEST(ManyRanksTest, FewValuesReachEveryRankWithTheSameBits) {
  for (const auto& [wire, world] :
       {std::pair{Wire::kMemory, 9}, {Wire::kMemory, 11}, {Wire::kMemory, 16}, {Wire::kGloo, 13}}) {
    std::vector<at::Tensor> sums(world);
    run_ranks(
        world,
        [&, world = world](const Group& group) {
          const auto control = group.make_communicator("control", Purpose::kControl);
          const int me = group.rank();
          at::Tensor sum = random_tensor({5}, 100 + me).to(at::kDouble);
          at::Tensor longs = at::full({2}, (int64_t{1} << 40) + (7 * me) % world, at::kLong);
          at::Tensor bits = at::full({1}, 1 << me, at::kInt);
          Pending first = control->all_reduce_sum(sum, "norm");
          Pending second = control->all_reduce_max(longs, "control");
          Pending third = control->all_reduce_or(bits, "flags");
          third.wait();
          first.wait();
          second.wait();
          sums[me] = sum;
          EXPECT_EQ(longs[1].item<int64_t>(), (int64_t{1} << 40) + world - 1);
          EXPECT_EQ(bits[0].item<int>(), (1 << world) - 1);
        },
        on(wire));
    at::Tensor expected = at::zeros({5}, at::kDouble);
    for (int r = 0; r < world; ++r) expected += random_tensor({5}, 100 + r).to(at::kDouble);
    for (const at::Tensor& sum : sums) {
      EXPECT_TRUE(sum.equal(sums[0]));
      EXPECT_TRUE(sum.allclose(expected, 1e-14, 1e-14));
    }
  }
}

TEST(ManyRanksTest, ARankThatNeverCallsIsNamedByOneThatWaitsForIt) {
  std::atomic<int> named = 0;
  run_ranks(
      12,
      [&](const Group& group) {
        const auto control = group.make_communicator("control", Purpose::kControl);
        if (group.rank() == 5) {
          std::this_thread::sleep_for(milliseconds(1500));
          return;
        }
        at::Tensor values = at::ones({3}, at::kInt);
        const std::string text =
            error_of([&] { control->all_reduce_max(values, "control message").wait(); });
        expect_words(text, {"all_reduce_max of control message: ", "rank "});
        if (text.find("rank 5 did not send") != std::string::npos) ++named;
      },
      on(Wire::kMemory, milliseconds(500)));
  EXPECT_GE(named, 1);
}

TEST_P(RowExchangeTest, TrafficIsWhatLeavesTheRank) {
  if (GetParam().two_level()) GTEST_SKIP() << "see two_level_exchange_test";
  const bool whole = GetParam().wire == Wire::kNative;
  run([whole](const Group& group) {
    const auto data = data_of(group);
    const int64_t world = group.world_size();
    at::Tensor rows = at::zeros({world, 10}, at::kBFloat16);
    at::Tensor received = at::zeros({world, 10}, at::kBFloat16);
    for (int i = 0; i < 3; ++i) data->exchange_rows(rows, received, "bucket").wait();
    reduced_rows(*data, rows, "bucket");
    reduced_rows(*data, rows.to(at::kFloat), "bucket");
    data->gather_rows(rows, "bucket").wait();
    data->all_reduce_sum(at::zeros({4}, at::kDouble), "norm").wait();
    data->broadcast(rows, 0, "parameters").wait();
    const Traffic traffic = data->traffic();
    const int64_t calls = world == 1 ? 0 : 1;
    EXPECT_EQ(traffic.exchange_calls, 5 * calls);
    EXPECT_EQ(traffic.exchange_bytes_sent, (4 * 2 + 4) * (world - 1) * 10);
    EXPECT_EQ(traffic.gather_calls, calls);
    EXPECT_EQ(traffic.gather_bytes_sent, (world - 1) * 10 * 2);
    EXPECT_EQ(traffic.small_calls, 2 * calls);
    const int64_t reduced = whole ? 2 * (world - 1) * 32 / world : (world - 1) * 32;
    const int64_t sent = group.rank() == 0 ? (world - 1) * world * 10 * 2 : 0;
    EXPECT_EQ(traffic.small_bytes_sent, reduced + sent);
  });
}

}  // namespace
}  // namespace zero
