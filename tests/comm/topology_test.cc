// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/process_group.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"
#include "zero/comm/find_topology.h"

namespace zero {
namespace {

TEST(TopologyTest, NumbersMachinesByTheirFirstRank) {
  const Topology topology({7, 7, 3, 3});
  EXPECT_EQ(topology, Topology::of_equal_machines(4, 2));
  EXPECT_EQ(topology.machines(), 2);
  EXPECT_EQ(topology.machine_of(3), 1);
  EXPECT_EQ(topology.describe(), "2 machines with 2 ranks each");
  EXPECT_EQ(Topology::of_one_machine(3).describe(), "1 machine with 3 ranks");
}

TEST(TopologyTest, TwoLevelsNeedEqualMachinesInRankOrder) {
  EXPECT_EQ(Topology({0, 0, 1, 1}).ranks_per_machine(), 2);
  EXPECT_TRUE(Topology({0, 0, 1, 1}).has_two_levels());
  EXPECT_EQ(Topology({0, 1, 0, 1}).ranks_per_machine(), 0);
  EXPECT_EQ(Topology({0, 0, 0, 1}).ranks_per_machine(), 0);
  EXPECT_EQ(Topology({0, 0, 1}).ranks_per_machine(), 0);
  EXPECT_EQ(Topology({0, 1, 2}).ranks_per_machine(), 1);
  EXPECT_EQ(Topology({0, 0, 0}).ranks_per_machine(), 3);
  for (const std::vector<int>& flat :
       {std::vector<int>{0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 2}, {0, 0, 0}, {0}}) {
    EXPECT_FALSE(Topology(flat).has_two_levels());
  }
  EXPECT_EQ(Topology({0, 1, 0, 1}).describe(),
            "2 machines with 2 ranks each, which do not follow one another");
  EXPECT_EQ(Topology({0, 0, 1}).describe(), "2 machines with 1 to 2 ranks each");
}

TEST(TopologyTest, AdviceForMachinesThatCannotExchangeInTwoLevels) {
  for (const std::vector<int>& good : {std::vector<int>{0, 0, 1, 1}, {0, 0, 0}, {0, 1, 2}, {0}}) {
    for (const int unknown_or_one : {0, 1}) EXPECT_EQ(advice(Topology(good), unknown_or_one), "");
  }
  expect_words(advice(Topology({0, 0, 1}), 2),
               {"2 machines with 1 to 2 ranks each", "same number"});
  expect_words(advice(Topology({0, 1, 0, 1}), 2),
               {"do not follow one another", "one after the other"});
}

TEST(TopologyTest, AdviceForRanksOfAMachineThatShareNoMemory) {
  EXPECT_EQ(advice(Topology({0, 0, 1, 1}), 2), "");
  EXPECT_EQ(advice(Topology({0, 0}), 2), "");
  expect_words(
      advice(Topology({0, 1, 2, 3}), 2),
      {"4 machines with 1 rank each, although 2 ranks were started on this one", "through sockets",
       "`ulimit -f`", "InitOptions::topology", "InitOptions::shared_memory"});
  expect_words(advice(Topology({0, 1, 2, 3}), 2, /*over_nccl=*/true),
               {"in place of in two levels", "InitOptions::topology"});
  EXPECT_EQ(advice(Topology({0, 1}), 2, /*over_nccl=*/true), "");
}

TEST(TopologyTest, OfASubgroup) {
  const Topology topology({0, 0, 1, 1, 2, 2});
  EXPECT_EQ(topology.of_ranks({1, 3, 5}), Topology({0, 1, 2}));
  EXPECT_EQ(topology.of_ranks({5, 4}), Topology({0, 0}));
}

TEST(TopologyTest, RefusesWhatIsNone) {
  expect_words(error_of([] { Topology({}); }), {"expected a machine for each rank"});
  expect_words(error_of([] { Topology::of_equal_machines(4, 3); }), {"divides the 4", "got 3"});
  expect_words(error_of([] { Topology::of_equal_machines(4, 0); }), {"got 0"});
}

// Calls body(store, rank) on a thread for each rank; returns their errors.
std::vector<std::string> on_ranks(
    int world_size, const std::function<void(const c10::intrusive_ptr<BoundedStore>&, int)>& body) {
  const auto hash = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      errors[rank] =
          error_of([&] { body(BoundedStore::of(hash, std::chrono::seconds(20)), rank); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// The same where no rank may throw.
void expect_on_ranks(
    int world_size, const std::function<void(const c10::intrusive_ptr<BoundedStore>&, int)>& body) {
  EXPECT_EQ(on_ranks(world_size, body), std::vector<std::string>(world_size));
}

Topology agreed(const c10::intrusive_ptr<BoundedStore>& store, int rank, int world_size,
                const std::optional<Topology>& stated, bool willing = true) {
  return agree_on_topology(store, rank, world_size, std::chrono::seconds(20),
                           std::chrono::steady_clock::now(), stated, willing);
}

// Ranks are threads here, so that all of them can read the memory of the one process.
TEST(FindTopologyTest, RanksThatReadEachOthersMemoryShareAMachine) {
  for (int run = 0; run < 40; ++run) {
    const int world_size = 1 + run % 4;
    expect_on_ranks(world_size, [&](const auto& store, int rank) {
      EXPECT_EQ(agreed(store, rank, world_size, std::nullopt),
                Topology::of_one_machine(world_size));
    });
  }
}

TEST(FindTopologyTest, ARankThatSharesNothingIsAlone) {
  expect_on_ranks(4, [](const auto& store, int rank) {
    EXPECT_EQ(agreed(store, rank, 4, std::nullopt, rank != 1), Topology({0, 1, 0, 0}));
  });
}

TEST(FindTopologyTest, WhatAllRanksStateHolds) {
  const Topology stated({0, 0, 1, 1});
  expect_on_ranks(
      4, [&](const auto& store, int rank) { EXPECT_EQ(agreed(store, rank, 4, stated), stated); });
}

TEST(FindTopologyTest, DifferentStatementsThrowOnEveryRank) {
  for (const std::optional<Topology>& other :
       {std::optional<Topology>(), std::optional<Topology>(Topology({0, 0, 0}))}) {
    const auto errors = on_ranks(3, [&](const auto& store, int rank) {
      agreed(store, rank, 3, rank == 2 ? other : Topology({0, 1, 2}));
    });
    for (int rank = 0; rank < 3; ++rank) {
      expect_words(errors[rank],
                   {"expected the same topology on every rank", "3 machines with 1 rank each",
                    other ? "1 machine with 3 ranks" : "none", "on rank 2", "on all ranks",
                    "this is rank " + std::to_string(rank)});
    }
  }
}

}  // namespace
}  // namespace zero
