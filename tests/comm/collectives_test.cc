// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The texts that a Communicator gathers, the arguments that it refuses, and shared memory. The rows
// that it moves and counts are in tests/comm/row_exchange_test.cc.

#include "zero/comm/row_communicator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <string>
#include <vector>

#include "tests/comm/all_shared_memory.h"
#include "tests/support/error_of.h"
#include "tests/support/transports.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

class CollectivesTest : public WireTest {};

INSTANTIATE_TEST_SUITE_P(Wires, CollectivesTest, ::testing::ValuesIn(wire_cases()),
                         [](const auto& info) { return wire_case_name(info); });

TEST_P(CollectivesTest, TextsOfEveryLength) {
  run([](const Group& group) {
    const auto control = group.make_communicator("control", Purpose::kControl);
    const int world = group.world_size();
    const int me = group.rank();
    std::vector<std::string> expected;
    for (int rank = 0; rank < world; ++rank) {
      expected.push_back(std::string(static_cast<size_t>(rank * 5), static_cast<char>('a' + rank)));
    }
    EXPECT_EQ(control->all_gather_text(expected[static_cast<size_t>(me)], "names"), expected);
    EXPECT_EQ(control->all_gather_text("", "nothing"),
              std::vector<std::string>(static_cast<size_t>(world)));
    // A long text of one rank is sent once to each of the others.
    const auto text = [&](int rank) {
      if (rank == world - 1) return std::string(300000, 'x') + "end";
      const bool second = world > 2 && rank == 1;
      return std::string(static_cast<size_t>(second ? 9000 : rank), 'y');
    };
    const int64_t before = control->traffic().small_bytes_sent;
    const auto texts = control->all_gather_text(text(me), "a document");
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_EQ(texts[static_cast<size_t>(rank)], text(rank));
    }
    const int64_t sent = control->traffic().small_bytes_sent - before;
    int64_t total = 0;
    for (const auto& of_rank : control->all_gather_text(std::to_string(sent), "bytes")) {
      total += std::stoll(of_rank);
    }
    EXPECT_LE(total, (world - 1) * (300003 + 9000 + world * 4200));
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
    expect_words(error_of([&] {
                   data->all_reduce_sum(at::zeros({2, 2}, at::kDouble), "b");
                 }),
                 {"contiguous 1-D", "[2, 2]"});
    expect_words(error_of([&] { data->broadcast(rows, static_cast<int>(world), "b"); }),
                 {"source"});
    if (RowCommunicator(*data).reduction_bytes(rows) > 0) {
      const at::Tensor odd = at::empty({5}, at::kByte);
      expect_words(error_of([&] {
                     RowCommunicator(*data).reduce_rows(
                         rows, odd, [](auto&) {}, "b");
                   }),
                   {"reduce_rows of b: expected a buffer of ", "bytes on cpu, got [5]"});
      expect_words(error_of([&] {
                     RowCommunicator(*data).reduce_rows(
                         rows, {}, [](auto&) {}, "b");
                   }),
                   {"an undefined tensor"});
    }
    EXPECT_TRUE(data->failed().empty());
    data->gather_rows(rows, "b").wait();
  });
}

// The elements of the row of rank `from` for rank `to`.
float value_of(int from, int to) { return static_cast<float>(10 * from + to); }

// Exchanges, reduces and gathers rows whose values name their ranks.
void expect_rows_arrive(Communicator& data) {
  const int world = data.world_size();
  const int me = data.rank();
  at::Tensor rows = at::empty({world, 70000});
  for (int to = 0; to < world; ++to) rows.select(0, to).fill_(value_of(me, to));
  at::Tensor received = at::zeros({world, 70000});
  data.exchange_rows(rows, received, "bucket").wait();
  float sum = 0;
  for (const at::Tensor& row : reduced_rows(data, rows, "bucket")) sum += row[69999].item<float>();
  EXPECT_EQ(sum, 10 * world * (world - 1) / 2 + world * me);
  data.gather_rows(rows, "bucket").wait();
  for (int from = 0; from < world; ++from) {
    EXPECT_EQ(rows[from][69999].item<float>(), value_of(from, from));
    if (from == me) continue;
    EXPECT_EQ(received[from][0].item<float>(), value_of(from, me));
  }
}

TEST(CommunicatorTest, OneRankMaySendWhereOthersShare) {
  RunOptions options = on(Wire::kShared);
  options.unwilling = 1;
  run_ranks(
      3,
      [](const Group& group) {
        const auto data = data_of(group);
        EXPECT_GT(RowCommunicator(*data).reduction_bytes(at::empty({3, 70000})), 0);
        EXPECT_EQ(RowCommunicator(*data).allocate(1).defined(), group.rank() != 1);
        expect_rows_arrive(*data);
      },
      options);
}

TEST(CommunicatorTest, RowsAreSentWhereSharedMemoryIsUsedUpBefore) {
  const std::vector<at::Tensor> all = all_shared_memory();
  run_ranks(
      3,
      [](const Group& group) {
        const auto data = data_of(group);
        EXPECT_GT(RowCommunicator(*data).reduction_bytes(at::empty({3, 70000})), 0);
        expect_rows_arrive(*data);
      },
      on(Wire::kShared));
}

// As one GPU does over NCCL.
TEST(CommunicatorTest, OneRankMayAskATransportThatHasEachCollective) {
  Communicator alone(make_simulated_backend(0, 1), "alone", milliseconds(1000),
                     RowTransport::kWhole);
  const at::Tensor rows = at::arange(6, at::kDouble).view({1, 6});
  const at::Tensor received = at::zeros_like(rows), values = rows[0].clone();
  alone.exchange_rows(rows, received, "rows").wait();
  alone.gather_rows(received, "rows").wait();
  alone.all_reduce_sum(values, "values").wait();
  alone.broadcast(values, 0, "values").wait();
  EXPECT_TRUE(at::equal(values, rows[0]));
  EXPECT_EQ(alone.traffic().small_bytes_sent, 0);
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

}  // namespace
}  // namespace zero
