// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/replica_sum.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

at::Tensor value(int shard, int rank, int64_t numel) {
  return random_tensor({numel}, 10 * shard + rank);
}

TEST(ReplicaSumTest, EveryReplicaHasTheSumInRankOrder) {
  // Sizes that the ranks do not divide; more shards than are under way at a time.
  const std::vector<int64_t> sizes{1, 5, 48, 7, 2};
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [&](const Group& group) {
      const auto replicas = group.make_communicator("replicas", Purpose::kData);
      BufferPool pool(at::kCPU, 1 << 20);
      std::vector<ReplicaShard> shards;
      for (size_t i = 0; i < sizes.size(); ++i) {
        const int shard = static_cast<int>(i);
        shards.push_back({value(shard, group.rank(), sizes[i]), replicas.get(), "shard"});
      }
      sum_over_replicas(shards, pool);
      for (size_t i = 0; i < sizes.size(); ++i) {
        const int shard = static_cast<int>(i);
        at::Tensor sum = value(shard, 0, sizes[i]);
        for (int r = 1; r < world_size; ++r) sum += value(shard, r, sizes[i]);
        EXPECT_TRUE(at::equal(shards[i].shard, sum)) << "shard " << i;
      }
    });
  }
}

TEST(ReplicaSumTest, EachRankSendsItsPartOfAShardTwice) {
  run_ranks(4, [](const Group& group) {
    const auto replicas = group.make_communicator("replicas", Purpose::kData);
    BufferPool pool(at::kCPU, 1 << 20);
    sum_over_replicas({{at::ones({400}), replicas.get(), "shard"}}, pool);
    EXPECT_EQ(replicas->traffic().exchange_bytes_sent, 3 * 100 * 4);
    EXPECT_EQ(replicas->traffic().gather_bytes_sent, 3 * 100 * 4);
    EXPECT_EQ(pool.held_bytes(), (400 + 400 + 100) * 4);
  });
}

}  // namespace
}  // namespace zero
