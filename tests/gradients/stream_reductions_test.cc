// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The reduction queue over a transport that works on streams: how long a peer that takes no part
// may hold up the thread that pushes.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "tests/support/flat_model.h"
#include "tests/support/reducer_options.h"
#include "zero/base/streams.h"
#include "zero/gradients/elementwise_wire.h"
#include "zero/gradients/gradient_reducer.h"
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

// With ReducerOptions::update_in_backward, of a host that enqueues a whole pass before the device
// begins.
TEST(StreamReductionsTest, ShardsThatAreReadOnTheStreamOfTheSumsAreTheSameMemory) {
  run_device_ranks(3, [](const Group& group) {
    const c10::DeviceGuard here(group.device());
    struct Updates final : BucketUpdates {
      void before_sending(int64_t, bool whole) override { EXPECT_TRUE(whole); }
      void update(int64_t bucket) override {
        places.insert(reducer->shard(bucket).const_data_ptr());
        ++count;
      }
      const GradientReducer* reducer = nullptr;
      std::set<const void*> places;
      int64_t count = 0;
    } updates;
    constexpr int64_t kNumel = 192;
    const auto on_device = at::TensorOptions().device(group.device());
    std::vector<at::Tensor> values;
    for (int i = 0; i < 10; ++i) values.push_back(at::zeros({kNumel}, on_device));
    FlatModel flat(values, group.world_size(), {Layout::kContiguous, 4 * kNumel});
    ASSERT_EQ(flat.buckets(), 10);
    BufferPool pool(group.device(), 1 << 20);
    const auto data = group.make_communicator("data", Purpose::kData);
    ReducerOptions options = reducer_options(flat.plan);
    options.update_in_backward = true;
    GradientReducer reducer(flat.plan, flat.table, {{data.get(), nullptr, 0}}, pool, options);
    updates.reducer = &reducer;
    reducer.connect();
    reducer.update_with(updates);
    for (const at::Tensor& value : flat.model.values) {
      value.mutable_grad() = at::ones({kNumel}, on_device);
    }
    emulated::enqueue(current_torch_stream(group.device()),
                      [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
    for (int64_t p = 0; p < 10; ++p) reducer.gradient_ready(p);
    EXPECT_EQ(updates.count, 10);
    // They take turns with the row that an exchange receives.
    EXPECT_LE(updates.places.size(), 2U);
    reducer.complete(1);
    reducer.consume();
  });
}

}  // namespace
}  // namespace zero
