// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Holds every RowExchange to its contract (zero/comm/row_exchange.h), over every transport, at
// 1, 2, 3 and 4 ranks of one machine and in two levels: through a Communicator, which chooses the
// exchange by its transport and topology.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/transports.h"
#include "zero/communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// The row of rank `from` for rank `to`. Exact in 16 bits.
at::Tensor values(int from, int to, int64_t n, at::ScalarType dtype) {
  return at::arange(n, at::kFloat).remainder(8).add_(8 * from + 64 * to).to(dtype);
}

class RowExchangeTest : public ::testing::TestWithParam<WireCase> {
 protected:
  void run(const std::function<void(const Group&)>& body,
           milliseconds timeout = std::chrono::seconds(30)) {
    run_ranks(GetParam().world_size, body,
              on(GetParam().wire, timeout, GetParam().ranks_per_machine));
  }
};

INSTANTIATE_TEST_SUITE_P(Wires, RowExchangeTest, ::testing::ValuesIn(wire_cases()),
                         [](const auto& info) { return wire_case_name(info); });

TEST_P(RowExchangeTest, ExchangeAndGatherInEveryDtype) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int me = group.rank();
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kInt}) {
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

// The row of rank `from` for rank `to`, with values that round in every sum.
at::Tensor fractions(int from, int to, int64_t n, at::ScalarType dtype) {
  return random_tensor({n}, 10 * from + to).to(dtype);
}

at::Tensor serial_sum(const std::vector<at::Tensor>& rows) {
  at::Tensor sum = rows.at(0).to(at::kFloat);
  for (size_t i = 1; i < rows.size(); ++i) sum = sum + rows[i].to(at::kFloat);
  return sum;
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
      for (const int64_t n : {1, 7, 1000, 70001}) {
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
        data->gather_rows(gathered, "bucket").wait();
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

TEST_P(RowExchangeTest, TheTransportChoosesTheExchange) {
  if (GetParam().two_level()) GTEST_SKIP() << "see two_level_exchange_test";
  run([](const Group& group) {
    const auto data = data_of(group);
    const int64_t world = group.world_size();
    const int64_t own = world == 1 ? 0 : 12;
    const Wire wire = GetParam().wire;
    const int64_t floats = wire == Wire::kShared ? 0 : wire == Wire::kNative ? own : world * own;
    EXPECT_EQ(data->reduction_bytes(at::zeros({world, 3})), floats);
    EXPECT_EQ(data->reduction_bytes(at::zeros({world, 6}, at::kBFloat16)),
              wire == Wire::kShared ? 0 : world * own);
    EXPECT_EQ(data->allocate(100).defined(), wire == Wire::kShared && world > 1);
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
    EXPECT_EQ(data->reduction_bytes(none), 0);
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
      buffers.push_back(at::empty({data->reduction_bytes(rows[i])}, at::kByte));
      const auto use = [&sums, i](const SummandRows& summands) {
        sums[i] = serial_sum(copies_of(summands, 300)).max().item<float>();
      };
      pending.push_back(data->reduce_rows(rows[i], buffers[i], use, "bucket"));
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
    const at::Tensor allocated = data->allocate(world * 300 * 2);
    for (at::Tensor rows :
         {allocated.defined() ? allocated.view(at::kHalf).view({world, 300}) : at::Tensor(),
          at::empty({world, 300}, at::kHalf)}) {
      if (!rows.defined()) continue;
      for (int round = 0; round < 4; ++round) {
        for (int to = 0; to < world; ++to) rows.select(0, to).fill_(value_of(me, to, round));
        std::vector<at::Tensor> received(world, at::Tensor());
        const at::Tensor buffer = at::empty({data->reduction_bytes(rows)}, at::kByte);
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
          data->reduce_rows(rows, buffer, use, "bucket").wait();
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

// ---- Errors ----

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
  for (const std::string call : {"exchange_rows", "reduce_rows", "gather_rows", "all_reduce_max"}) {
    std::atomic<int> named = 0;
    run(
        [&](const Group& group) {
          auto data = data_of(group);
          wait_for(*data, call, "warm-up");
          if (group.rank() == world - 1) return;  // Its connections end with it.
          const std::string text = error_of([&] { wait_for(*data, call, "b 3"); });
          expect_words(text, {call + " of b 3: ", "this is rank " + std::to_string(group.rank()) +
                                                      " of " + std::to_string(world)});
          if (text.find("rank " + std::to_string(world - 1)) != std::string::npos) ++named;
          EXPECT_EQ(data->failed(), text);
          expect_words(error_of([&] { wait_for(*data, call, "b 4"); }),
                       {call + " of b 4: refused", "the group failed before"});
        },
        std::chrono::seconds(20));
    // In two levels a rank may first lose one that has lost it, and a backend with collectives of
    // its own numbers the ranks of its level.
    const bool own_numbers = GetParam().two_level() && GetParam().wire == Wire::kNative;
    EXPECT_GE(named, own_numbers ? 0 : GetParam().two_level() ? 1 : world - 1);
  }
}

TEST_P(RowExchangeTest, AnErrorInTheUseOfRowsEndsTheGroup) {
  if (GetParam().world_size == 1) return;
  // A rank that fails first ends the group, which others may see first.
  std::atomic<int> with_reason = 0;
  run([&](const Group& group) {
    const auto data = data_of(group);
    const at::Tensor rows = at::ones({group.world_size(), 300});
    const at::Tensor buffer = at::empty({data->reduction_bytes(rows)}, at::kByte);
    const auto use = [](const SummandRows&) { TORCH_CHECK(false, "no room for the sum"); };
    const std::string text = error_of([&] { data->reduce_rows(rows, buffer, use, "b").wait(); });
    expect_words(text, {"reduce_rows of b: "});
    if (text.find("no room for the sum") != std::string::npos) ++with_reason;
    EXPECT_EQ(data->failed(), text);
  });
  EXPECT_GE(with_reason, GetParam().two_level() ? 1 : GetParam().world_size);
}

}  // namespace
}  // namespace zero
