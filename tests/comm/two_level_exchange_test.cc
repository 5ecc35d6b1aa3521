// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What is particular to exchanges in two levels: formats that are added up on the way, bytes on
// links, and waits in any order. tests/comm/row_exchange_test.cc has the contract of all exchanges.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/transports.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// A rank is not later than that.
constexpr std::chrono::seconds kLatest{10};

std::vector<WireCase> two_level_cases() {
  std::vector<WireCase> all = wire_cases();
  std::erase_if(all, [](const WireCase& c) { return !c.two_level(); });
  return all;
}

class TwoLevelExchangeTest : public WireTest {
 protected:
  int machines() const { return GetParam().machines(); }
  int local_ranks() const { return GetParam().ranks_per_machine; }
  bool whole() const { return GetParam().wire == Wire::kNative; }
};

INSTANTIATE_TEST_SUITE_P(Wires, TwoLevelExchangeTest, ::testing::ValuesIn(two_level_cases()),
                         [](const auto& info) { return wire_case_name(info); });

// Bytes that stand for numbers a hundred times as large, as some integer format might.
class Hundreds : public RowFormat {
 public:
  explicit Hundreds(bool encodes) : encodes_(encodes) {}
  void sum(const SummandRows& rows, const at::Tensor& sum) const override {
    sum.zero_();
    for (const at::Tensor& row : copies_of(rows, sum.numel())) sum.add_(row.to(at::kFloat), 100);
  }
  bool encodes_sums() const override { return encodes_; }
  void encode_sums(const at::Tensor& sums, const at::Tensor& rows) const override {
    rows.copy_(sums / 100);
  }

 private:
  const bool encodes_;
};

TEST_P(TwoLevelExchangeTest, AFormatIsAddedUpWithinAMachineAndSentAsItSays) {
  run([&](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const int64_t n = 1001;
    at::Tensor rows = at::empty({world, n}, at::kByte);
    for (int to = 0; to < world; ++to) rows.select(0, to).fill_(1 + group.rank() + to);
    for (const bool encodes : {false, true}) {
      const Hundreds format(encodes);
      const RowValues values{&format, n};
      const at::Tensor buffer =
          at::empty({RowCommunicator(*data).reduction_bytes(rows, values)}, at::kByte);
      std::vector<at::Tensor> sums;
      const auto use = [&](const SummandRows& brought) { sums = copies_of(brought, n); };
      RowCommunicator(*data).reduce_rows(rows, buffer, use, "bucket", values).wait();
      float total = 0;
      for (const at::Tensor& sum : sums) {
        EXPECT_EQ(sum.scalar_type(), encodes ? at::kByte : at::kFloat);
        EXPECT_EQ(sum.min().item<float>(), sum.max().item<float>());
        total += sum[0].item<float>() * (encodes ? 100 : 1);
      }
      EXPECT_EQ(total, 100 * (world * (1 + group.rank()) + world * (world - 1) / 2));
    }
  });
}

// A machine sends each sum and each row once, whatever the number of its ranks.
TEST_P(TwoLevelExchangeTest, BytesOnLinks) {
  run([&](const Group& group) {
    const auto data = data_of(group);
    const int64_t world = group.world_size(), n = 10;
    const int64_t others = machines() - 1;
    const auto links = [&](const std::function<void()>& call) {
      const int64_t before = data->traffic().link_bytes_sent;
      call();
      return data->traffic().link_bytes_sent - before;
    };
    const at::Tensor bf16 = at::zeros({world, n}, at::kBFloat16);
    const at::Tensor fp32 = at::zeros({world, n});
    const int64_t sums = others * n * 4;
    EXPECT_EQ(links([&] { reduced_rows(*data, fp32, "b"); }), sums);
    EXPECT_EQ(links([&] { reduced_rows(*data, bf16, "b"); }), sums);
    EXPECT_EQ(links([&] { data->gather_rows(bf16, "b").wait(); }), others * n * 2);
    const at::Tensor received = at::zeros({world, n});
    EXPECT_EQ(links([&] { data->exchange_rows(fp32, received, "b").wait(); }),
              others * local_ranks() * n * 4);
    const int64_t norm = whole() ? 2 * others * 16 / machines() : others * 16;
    EXPECT_EQ(links([&] { data->all_reduce_sum(at::zeros({2}, at::kDouble), "norm").wait(); }),
              norm);
    EXPECT_EQ(links([&] { data->broadcast(fp32, 0, "p").wait(); }),
              group.rank() == 0 ? others * world * n * 4 : 0);
    const Traffic traffic = data->traffic();
    EXPECT_EQ(traffic.exchange_calls, 3);
    EXPECT_EQ(traffic.gather_bytes_sent, (others + machines() * (local_ranks() - 1)) * n * 2);
  });
}

TEST_P(TwoLevelExchangeTest, TakesNoMemoryForRowsThatAreReadInPlace) {
  if (GetParam().wire != Wire::kShared) GTEST_SKIP() << "all rows are received";
  run([&](const Group& group) {
    const at::Tensor rows = at::zeros({group.world_size(), 1024});
    // Copied rows, sums, and what comes from other machines.
    const int64_t copied = machines() > 4 ? group.world_size() : 0;
    EXPECT_EQ(RowCommunicator(*data_of(group)).reduction_bytes(rows),
              (copied + 2 * machines()) * 4096);
  });
}

TEST_P(TwoLevelExchangeTest, FromEverySource) {
  run([](const Group& group) {
    const auto data = data_of(group);
    for (int source = 0; source < group.world_size(); ++source) {
      at::Tensor values = at::full({3, 5}, group.rank(), at::kFloat);
      data->broadcast(values, source, "values").wait();
      EXPECT_EQ(values.min().item<float>(), source);
      EXPECT_EQ(values.max().item<float>(), source);
    }
  });
}

// As when ranks use their layers in different orders while gathers are under way.
TEST_P(TwoLevelExchangeTest, RanksMayWaitInDifferentOrders) {
  if (whole()) GTEST_SKIP() << "a backend with collectives of its own asks for one order";
  run([](const Group& group) {
    const auto data = data_of(group);
    constexpr int kOperations = 6;
    std::vector<at::Tensor> rows;
    std::vector<Pending> pending;
    for (int i = 0; i < kOperations; ++i) {
      rows.push_back(at::zeros({group.world_size(), 300}));
      rows.back().select(0, group.rank()).fill_(100 * i + group.rank());
      pending.push_back(data->gather_rows(rows.back(), "b " + std::to_string(i)));
    }
    for (int k = 0; k < kOperations; ++k) pending[(k + group.rank()) % kOperations].wait();
    for (int i = 0; i < kOperations; ++i) {
      for (int from = 0; from < group.world_size(); ++from) {
        EXPECT_EQ(rows[i][from][299].item<float>(), 100 * i + from);
      }
    }
  });
}

// The sum of a machine is under way to the others while a later bucket is still missing a rank.
TEST_P(TwoLevelExchangeTest, AMachineSendsItsSumsWithoutWaitingForLaterRows) {
  if (whole()) GTEST_SKIP() << "the second level starts in the call";
  std::atomic<int> first_done = 0;
  run([&](const Group& group) {
    const auto data = data_of(group);
    const int world = group.world_size();
    const auto reduce = [&](const at::Tensor& rows, const at::Tensor& buffer, float& sum) {
      return RowCommunicator(*data).reduce_rows(
          rows, buffer,
          [&sum, n = rows.size(1)](const SummandRows& brought) {
            sum = 0;
            for (const at::Tensor& row : copies_of(brought, n)) sum += row[0].item<float>();
          },
          "bucket");
    };
    const at::Tensor one = at::full({world, 300}, 1.0F), two = at::full({world, 300}, 2.0F);
    const at::Tensor buffer = at::empty({RowCommunicator(*data).reduction_bytes(one)}, at::kByte);
    const at::Tensor other = at::empty({RowCommunicator(*data).reduction_bytes(two)}, at::kByte);
    float first = 0, second = 0;
    Pending a = reduce(one, buffer, first);
    Pending b;
    if (group.rank() != 0) b = reduce(two, other, second);
    a.wait();
    ++first_done;
    EXPECT_EQ(first, world);
    if (group.rank() == 0) {
      while (first_done < world) std::this_thread::sleep_for(milliseconds(1));
      b = reduce(two, other, second);
    }
    b.wait();
    EXPECT_EQ(second, 2 * world);
  });
}

TEST_P(TwoLevelExchangeTest, ARankThatIsLateIsNamedWithinTheTimeout) {
  if (whole()) return;
  const int world = GetParam().world_size;
  std::atomic<int> named{0}, ended{0};
  run(
      [&](const Group& group) {
        const auto data = data_of(group);
        at::Tensor rows = at::zeros({world, 300});
        data->gather_rows(rows, "warm-up").wait();
        const auto start = std::chrono::steady_clock::now();
        if (group.rank() == world - 1) {  // late until the others have waited in vain
          while (ended < world - 1 && std::chrono::steady_clock::now() < start + kLatest) {
            std::this_thread::sleep_for(milliseconds(5));
          }
          return;
        }
        const std::string text = error_of([&] { reduced_rows(*data, rows, "b 3"); });
        EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(500 + 1000));
        ++ended;
        // One that waits for a rank which waits for the late one names that rank.
        expect_words(text, {"reduce_rows of b 3: ", "rank ", "this is rank "});
        if (text.find("rank " + std::to_string(world - 1)) != std::string::npos) ++named;
      },
      milliseconds(500));
  EXPECT_GE(named, 1);
}

// An exchange within a machine counts its ranks from 0.
TEST(TwoLevelSharedTest, ARowOfAnotherSizeIsOfTheRankThatSentIt) {
  run_ranks(
      4,
      [](const Group& group) {
        const auto data = data_of(group);
        const at::Tensor rows = at::zeros({4, group.rank() % 2 == 0 ? 2000 : 1000}, at::kByte);
        const std::string text = error_of([&] { data->gather_rows(rows, "rows").wait(); });
        if (group.rank() != 2) return;
        expect_words(text, {"lost rank 3: shared memory: expected a row of 2000 bytes, got 1000"});
        EXPECT_EQ(text.find("rank 1"), std::string::npos) << text;
      },
      on(Wire::kShared, milliseconds(5000), /*ranks_per_machine=*/2));
}

TEST(TwoLevelTopologyTest, ASubgroupHasTheMachinesOfItsRanks) {
  run_ranks(
      4,
      [](const Group& group) {
        EXPECT_TRUE(group.topology().has_two_levels());
        const std::vector<int> ranks =
            group.rank() % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3};
        const Group across = group.subgroup(ranks, "across");
        EXPECT_EQ(across.topology(), Topology::of_equal_machines(2, 1));
        const auto data = data_of(across);
        at::Tensor rows = at::full({2, 4}, group.rank(), at::kFloat);
        data->gather_rows(rows, "rows").wait();
        EXPECT_EQ(data->traffic().link_bytes_sent, 16);
        const auto flat = group.make_communicator("flat", Purpose::kData, /*two_level=*/false);
        at::Tensor all = at::full({4, 4}, group.rank(), at::kFloat);
        flat->gather_rows(all, "rows").wait();
        EXPECT_EQ(all[3][3].item<float>(), 3);
        EXPECT_EQ(flat->traffic().gather_bytes_sent, 3 * 16);
        EXPECT_EQ(flat->traffic().link_bytes_sent, 2 * 16);
        reduced_rows(*flat, Rows(at::zeros({10}), BucketRows({1, 3, 6, 10})), "unequal rows");
        const int64_t sent = group.rank() < 2 ? 3 + 4 : 1 + 2;
        EXPECT_EQ(flat->traffic().link_bytes_sent, 2 * 16 + sent * 4);
      },
      on(Wire::kMemory, std::chrono::seconds(30), 2));
}

}  // namespace
}  // namespace zero
