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

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
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
      reduction.rows = Rows(pool.acquire(2 * row, at::kFloat).copy_(at::full({2 * row}, 3.0)),
                            BucketRows(2, row));
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

constexpr int64_t kBuckets = 10;

// Of ReducerOptions::update_in_backward. The pass has late work for each bucket that is sent, and
// an update takes its time too.
struct LateUpdates final : BucketUpdates {
  void before_sending(int64_t bucket, bool has_all_gradients) override {
    EXPECT_TRUE(has_all_gradients);
    emulated::enqueue(current_torch_stream(device), [this, bucket] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      passed[bucket] = true;
    });
  }
  void update(int64_t bucket) override {
    places.insert(reducer->shard(bucket).const_data_ptr());
    ++enqueued;
    emulated::enqueue(current_torch_stream(device), [this, bucket] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++(passed[bucket] ? updated : too_early);
    });
  }

  explicit LateUpdates(at::Device of) : device(of) {}
  const at::Device device;
  const GradientReducer* reducer = nullptr;
  std::array<std::atomic<bool>, kBuckets> passed{};
  std::atomic<int64_t> updated = 0, too_early = 0;
  int64_t enqueued = 0;
  std::set<const void*> places;  // of shards
};

// A pass that the host enqueues before the device begins, and the call that completes its round.
// `at_end` is called between.
void run_pass(const Group& group, LateUpdates& updates, const std::function<void()>& at_end) {
  const c10::DeviceGuard here(group.device());
  constexpr int64_t kNumel = 192;
  const auto on_device = at::TensorOptions().device(group.device());
  std::vector<at::Tensor> values;
  for (int64_t i = 0; i < kBuckets; ++i) values.push_back(at::zeros({kNumel}, on_device));
  FlatModel flat(values, group.world_size(), {Layout::kContiguous, 4 * kNumel});
  ASSERT_EQ(flat.buckets(), kBuckets);
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
  for (int64_t p = 0; p < kBuckets; ++p) reducer.gradient_ready(p);
  at_end();
  reducer.complete(1);
  reducer.consume();
  emulated::enqueue(current_torch_stream(group.device()),
                    [&] { EXPECT_EQ(updates.updated, kBuckets) << "in a step"; });
  EmulatedDevice::finish();
}

TEST(StreamReductionsTest, AnUpdateIsBehindWhatThePassHadToDoAndBeforeTheStep) {
  for (const int world_size : {1, 3}) {
    for (const bool over_host : {false, true}) {
      run_device_ranks(world_size,
                       [](const Group& group) {
                         LateUpdates updates(group.device());
                         run_pass(group, updates, [] {});
                         EXPECT_EQ(updates.too_early, 0);
                       },
                       {.over_host = over_host});
    }
  }
}

TEST(StreamReductionsTest, ShardsThatAreReadOnTheStreamOfTheSumsAreTheSameMemory) {
  run_device_ranks(3, [](const Group& group) {
    LateUpdates updates(group.device());
    run_pass(group, updates, [&] {
      EXPECT_EQ(updates.enqueued, kBuckets);
      // They take turns with the row that an exchange receives.
      EXPECT_LE(updates.places.size(), 2U);
    });
  });
}

}  // namespace
}  // namespace zero
