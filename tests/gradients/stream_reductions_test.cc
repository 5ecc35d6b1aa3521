// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The reduction queue over a transport that works on streams: how long a peer that takes no part
// may hold up the thread that pushes.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <utility>
#include <vector>

#include "tests/support/device/emulated_network.h"
#include "zero/gradients/elementwise_wire.h"
#include "zero/gradients/reduction_queue.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

TEST(StreamReductionsTest, APeerThatTakesNoPartHoldsUpAPassOnceAndNotPerBucket) {
  run_device_ranks(2, [](const Group& group) {
    const at::Device device = group.device();
    const c10::DeviceGuard here(device);
    const auto data = group.make_communicator("data", Purpose::kData);
    const auto turn = group.make_communicator("turn", Purpose::kControl);
    const ElementwiseWire wire(at::kFloat);
    BufferPool pool(device, 1 << 20);
    ReductionQueue queue(pool);
    std::vector<at::Tensor> shards;
    const auto push = [&](int64_t row) {
      BucketReduction reduction;
      reduction.wire = &wire;
      reduction.rows =
          Rows(pool.take(2 * row, at::kFloat).copy_(at::full({2 * row}, 3.0)), BucketRows(2, row));
      reduction.shard = at::zeros({row}, at::TensorOptions().device(device));
      reduction.group = data.get();
      reduction.bucket = static_cast<int64_t>(shards.size());
      shards.push_back(reduction.shard);
      queue.push(std::move(reduction));
    };
    // Four of these are 8 MiB, the most that may be under way.
    constexpr int64_t kLarge = 1 << 18, kSmall = 8;
    for (const int64_t row : {kLarge, kSmall}) push(row);  // the first of a size connects
    queue.drain();
    const auto push_all = [&] {
      for (int b = 0; b < 4; ++b) push(kLarge);
      for (int b = 0; b < 300; ++b) push(kSmall);
    };
    if (group.rank() == 0) {
      // 20 ms for each of them would be 6 s.
      const auto start = Clock::now();
      push_all();
      EXPECT_GT(Clock::now() - start, std::chrono::milliseconds(20));
      EXPECT_LT(Clock::now() - start, std::chrono::seconds(3));
    }
    turn->all_reduce_max(at::zeros({1}, at::kInt), "rank 0 has pushed").wait();
    if (group.rank() == 1) push_all();
    queue.drain();
    for (const at::Tensor& shard : shards) {
      EXPECT_TRUE(at::equal(shard.to(at::kCPU), at::full({shard.numel()}, 6.0)));
    }
  });
}

}  // namespace
}  // namespace zero
