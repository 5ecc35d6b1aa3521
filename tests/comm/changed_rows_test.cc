// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Gathers that send to other machines what has changed in a row, over every transport that can,
// between machines of one and of several ranks.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bookkeeping/bucket_rows.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/transports.h"
#include "zero/comm/exchange/changed_row.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

// Every shape in memory, and of the other wires those with the most and the fewest steps.
std::vector<WireCase> cases() {
  std::vector<WireCase> all{
      {Wire::kGloo, 2, 1}, {Wire::kGloo, 6, 3}, {Wire::kShared, 2, 1}, {Wire::kShared, 10, 2}};
  for (const auto& [world, local] :
       {std::pair{2, 1}, {3, 1}, {4, 1}, {4, 2}, {6, 3}, {6, 2}, {10, 2}}) {
    all.push_back({Wire::kMemory, world, local});
  }
  return all;
}

class ChangedRowsTest : public WireTest {};

INSTANTIATE_TEST_SUITE_P(Wires, ChangedRowsTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return wire_case_name(info); });

// The row of a rank before step `step`.
at::Tensor row_of(int rank, int step, int64_t n, c10::ScalarType dtype) {
  at::Tensor row = 0.02 * random_tensor({n}, 1000 + rank);
  for (int s = 0; s < step; ++s) row += 1e-3 * random_tensor({n}, 17 * s + rank);
  return row.to(dtype);
}

TEST_P(ChangedRowsTest, EveryRankHasTheBitsOfEveryRow) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size(), me = group.rank();
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int64_t n : {1, 5, 1000, 20000}) {
        at::Tensor rows = at::zeros({world, n}, dtype);
        for (int r = 0; r < world; ++r) rows.select(0, r).copy_(row_of(r, 0, n, dtype));
        for (int step = 1; step < 4; ++step) {
          const at::Tensor before = rows.select(0, me).clone();
          rows.select(0, me).copy_(row_of(me, step, n, dtype));
          RowCommunicator(*data).gather_rows(rows, "bucket", before).wait();
          for (int r = 0; r < world; ++r) {
            ASSERT_TRUE(rows.select(0, r).equal(row_of(r, step, n, dtype)))
                << dtype << " " << n << " step " << step << " row " << r;
          }
        }
      }
    }
  });
}

// As of parameters with one owner. In one level some peers share memory and others do not.
TEST_P(ChangedRowsTest, RowsOfDifferentLengthsInOneLevel) {
  run([](const Group& group) {
    const auto data = group.make_communicator("data", Purpose::kData, /*two_level=*/false);
    const int world = group.world_size(), me = group.rank();
    std::vector<int64_t> ends;
    for (int r = 0; r < world; ++r) ends.push_back((r == 0 ? 0 : ends[r - 1]) + (r % 3) * 30000);
    const Rows rows(at::zeros({ends.back()}), BucketRows(ends));
    for (int step = 1; step < 3; ++step) {
      const at::Tensor own = rows.row(me), before = own.clone();
      own.copy_(row_of(me, step, own.numel(), at::kFloat));
      RowCommunicator(*data).gather_rows(rows, "bucket", before).wait();
      for (int r = 0; r < world; ++r) {
        const at::Tensor row = rows.row(r);
        EXPECT_TRUE(row.equal(row_of(r, step, row.numel(), at::kFloat))) << r;
      }
    }
  });
}

// Several at a time, waited for in different orders, as with overlapped gathers.
TEST_P(ChangedRowsTest, SeveralAreUnderWay) {
  run([](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size(), me = group.rank();
    std::vector<at::Tensor> rows;
    std::vector<Pending> pending;
    for (int i = 0; i < 5; ++i) {
      rows.push_back(at::zeros({world, 30000}));
      const at::Tensor before = rows[i].select(0, me).clone();
      rows[i].select(0, me).fill_(100 * i + me);
      pending.push_back(
          RowCommunicator(*data).gather_rows(rows[i], "b " + std::to_string(i), before));
    }
    for (int k = 0; k < 5; ++k) pending[(k + me) % 5].wait();
    for (int i = 0; i < 5; ++i) {
      for (int r = 0; r < world; ++r) {
        EXPECT_EQ(rows[i][r].min().item<float>(), 100 * i + r);
        EXPECT_EQ(rows[i][r].max().item<float>(), 100 * i + r);
      }
    }
  });
}

TEST_P(ChangedRowsTest, LinksCarryTheChangesAlone) {
  const int machines = GetParam().machines();
  const bool shared = GetParam().wire == Wire::kShared;
  run([&](const Group& group) {
    const auto data = data_of(group);
    const int64_t n = 50000;
    const auto on_links = [&](const at::Tensor& change) {
      at::Tensor rows = at::full({group.world_size(), n}, 1.0F);
      const at::Tensor before = rows.select(0, group.rank()).clone();
      rows.select(0, group.rank()).add_(change);
      const int64_t sent = data->traffic().link_bytes_sent;
      RowCommunicator(*data).gather_rows(rows, "bucket", before).wait();
      return data->traffic().link_bytes_sent - sent;
    };
    const int64_t peers = machines - 1;
    const int64_t blocks = (n + 127) / 128;
    // Ranks that share memory pass on the memory of a whole message.
    const int64_t most = max_changed_row_bytes(at::zeros({n}));
    EXPECT_EQ(on_links(at::zeros({n})), peers * (shared ? most : 16 + 2 * blocks));
    const int64_t small = on_links(at::full({n}, 1e-4F));
    EXPECT_LT(small, peers * (shared ? most + 1 : n * 4 * 45 / 100));
    // Never more than the row, but for the header.
    const int64_t large = on_links(at::arange(n, at::kFloat).mul(-1e4F));
    EXPECT_LE(large, peers * (shared ? most : n * 4 + 16));
  });
}

TEST_P(ChangedRowsTest, ARankWhoseRowsDifferThrows) {
  run([](const Group& group) {
    const auto data = data_of(group);
    // The first one of the second machine receives rank 0's row from it.
    const bool differs = group.rank() == GetParam().ranks_per_machine;
    at::Tensor rows = at::full({group.world_size(), 3000}, 1.0F);
    const at::Tensor before = rows.select(0, group.rank()).clone();
    rows.select(0, group.rank()).fill_(1.001);
    if (differs) rows[0][7] = 0.5;
    const std::string text =
        error_of([&] { RowCommunicator(*data).gather_rows(rows, "b 3", before).wait(); });
    if (!differs) return;  // others may have all that they need
    expect_words(text, {"gather_rows of b 3", "rank 0 sends what has changed", "differ",
                        "refresh_master_parameters()", "GatherWire::kWhole",
                        "this is rank " + std::to_string(group.rank())});
  });
}

TEST_P(ChangedRowsTest, WrongArgumentsAreRefused) {
  run([](const Group& group) {
    const auto data = data_of(group);
    EXPECT_TRUE(RowCommunicator(*data).sends_changes(at::kFloat, at::kCPU));
    EXPECT_FALSE(RowCommunicator(*data).sends_changes(at::kDouble, at::kCPU));
    EXPECT_FALSE(RowCommunicator(*data).sends_changes(at::kFloat, at::Device(at::kCUDA, 0)));
    const at::Tensor rows = at::zeros({group.world_size(), 10});
    expect_words(error_of([&] { RowCommunicator(*data).gather_rows(rows, "b", at::zeros({11})); }),
                 {"gather_rows of b", "`before`", "[11]"});
    expect_words(error_of([&] {
                   RowCommunicator(*data).gather_rows(rows, "b", at::zeros({10}, at::kHalf));
                 }),
                 {"gather_rows of b", "`before`"});
    EXPECT_EQ(data->failed(), "");
  });
}

TEST(ChangedRowsOfOneMachineTest, RowsAreSentWhole) {
  for (const Wire wire : {Wire::kMemory, Wire::kNative, Wire::kShared}) {
    run_ranks(
        2,
        [](const Group& group) {
          const auto data = data_of(group);
          EXPECT_FALSE(RowCommunicator(*data).sends_changes(at::kFloat, at::kCPU));
          const at::Tensor rows = at::zeros({2, 10});
          expect_words(
              error_of([&] { RowCommunicator(*data).gather_rows(rows, "b", at::zeros({10})); }),
              {"gather_rows of b", "sends rows whole"});
        },
        on(wire));
  }
}

}  // namespace
}  // namespace zero
