// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "tests/support/device/emulated_device.h"
#include "zero/base/streams.h"

namespace zero {
namespace {

constexpr int64_t kMiB = 1 << 20;

const void* place(const at::Tensor& buffer) { return buffer.storage().data(); }

TEST(BufferPoolTest, TheSmallestThatFitsIsUsedAgain) {
  BufferPool pool(at::kCPU, 1 << 20);
  const at::Tensor large = pool.acquire(60, at::kFloat), small = pool.acquire(40, at::kFloat);
  const void *large_place = place(large), *small_place = place(small);
  pool.release(large);
  pool.release(small);
  const at::Tensor first = pool.acquire(70, at::kBFloat16);
  EXPECT_EQ(place(first), small_place);
  EXPECT_EQ(first.numel(), 70);
  EXPECT_EQ(first.scalar_type(), at::kBFloat16);
  EXPECT_EQ(place(pool.acquire(50, at::kFloat)), large_place);
  EXPECT_EQ(pool.held_bytes(), 400);
}

TEST(BufferPoolTest, OneMoreThanTwiceAsLargeIsLeft) {
  BufferPool pool(at::kCPU, 1 << 20);
  const at::Tensor given = pool.acquire(100, at::kByte);
  pool.release(given);
  EXPECT_NE(place(pool.acquire(49, at::kByte)), place(given));
  EXPECT_EQ(place(pool.acquire(50, at::kByte)), place(given));
  EXPECT_EQ(pool.held_bytes(), 149);
}

TEST(BufferPoolTest, TrimFreesWhatIsTooMuchAndPeakRemembers) {
  BufferPool pool(at::kCPU, 250);
  std::vector<at::Tensor> taken;
  for (int i = 0; i < 4; ++i) taken.push_back(pool.acquire(100, at::kByte));
  EXPECT_EQ(pool.held_bytes(), 400);
  pool.trim();  // nothing of it is free
  EXPECT_EQ(pool.held_bytes(), 400);
  for (const at::Tensor& t : taken) pool.release(t);
  taken.clear();
  pool.trim();
  EXPECT_EQ(pool.held_bytes(), 200);
  pool.trim();
  EXPECT_EQ(pool.held_bytes(), 200);
  const at::Tensor again = pool.acquire(100, at::kByte), and_again = pool.acquire(100, at::kByte);
  EXPECT_EQ(pool.held_bytes(), 200);
  const at::Tensor new_one = pool.acquire(100, at::kByte);
  EXPECT_EQ(pool.held_bytes(), 300);
  EXPECT_EQ(pool.peak_bytes(), 400);
}

TEST(BufferPoolTest, WhatCannotBeAllocatedIsNotHeld) {
  BufferPool pool(at::kCPU, 250, [](int64_t) -> at::Tensor { throw std::bad_alloc(); });
  EXPECT_THROW(pool.acquire(1 << 20, at::kByte), std::bad_alloc);
  EXPECT_EQ(pool.held_bytes(), 0);
  EXPECT_EQ(pool.peak_bytes(), 0);
}

TEST(BufferPoolTest, LargeBuffersAreAskedForAndSmallOnesAreNot) {
  std::vector<int64_t> asked;
  bool full = false;
  BufferPool pool(at::kCPU, 0, [&](int64_t bytes) {
    asked.push_back(bytes);
    return full ? at::Tensor() : at::empty({bytes}, at::kByte);
  });
  pool.allocate(65535);
  EXPECT_TRUE(asked.empty());
  EXPECT_EQ(pool.allocate(65536).numel(), 65536);
  full = true;
  EXPECT_EQ(pool.acquire(100000, at::kFloat).numel(), 100000);
  EXPECT_EQ(asked, (std::vector<int64_t>{65536, 400000}));
}

TEST(BufferPoolTest, BuffersOfSeveralPagesAreWholeAndAligned) {
  const BufferPool pool(at::kCPU, 0);
  for (const int64_t bytes : {2 * kMiB, 2 * kMiB + 1, 6 * kMiB - 1, 6 * kMiB}) {
    const at::Tensor buffer = pool.allocate(bytes);
    ASSERT_EQ(buffer.numel(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data_ptr()) % static_cast<uintptr_t>(2 * kMiB),
              0U);
    buffer.fill_(1);
    EXPECT_EQ(buffer.sum().item<int64_t>(), bytes);
  }
}

// A plain query would end a capture that is under way in another thread.
TEST(BufferPoolTest, IsAskedForBuffersBesideACapture) {
  const c10::Device device(kEmulated, 0);
  BufferPool pool(device, 1 << 20);
  EmulatedGraph graph;
  const c10::StreamGuard here(new_stream(device));
  pool.release(pool.acquire(100, at::kByte, BufferPool::Order::kWait));
  graph.capture_begin();
  {
    const c10::StreamGuard beside(new_stream(device));
    pool.acquire(100, at::kByte);
  }
  graph.capture_end();
  EmulatedDevice::finish();
  EXPECT_EQ(EmulatedDevice::take_violations(), std::vector<std::string>());
}

}  // namespace
}  // namespace zero
