// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint/shard_copies.h: what is copied, in which order, and who waits for it.
#include "zero/checkpoint/shard_copies.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

FileToSave file_of(int64_t tensors) {
  FileToSave file{"rank", {}};
  for (int64_t i = 0; i < tensors; ++i) {
    file.tensors.push_back({{}, at::full({3}, static_cast<double>(i), at::kFloat)});
  }
  return file;
}

TEST(ShardCopiesTest, TensorsOfBucketsAreCopiedAndOthersAreNot) {
  FileToSave file = file_of(5);
  const std::vector<TensorToSave> before = file.tensors;
  ShardCopies copies(3);
  copies.copy(file, {0, 2, ShardCopies::kOfNone, 0, 2});
  copies.wait_for_all();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(file.tensors[i].tensor.is_same(before[i].tensor), i == 2) << i;
    before[i].tensor.fill_(-1);
    EXPECT_EQ(file.tensors[i].tensor[0].item<float>(), i == 2 ? -1 : static_cast<float>(i)) << i;
  }
}

// Each bucket is changed as soon as wait() returns, and no copy has a new value.
TEST(ShardCopiesTest, AChangeWaitsForTheCopyOfItsBucketAlone) {
  constexpr int64_t kBuckets = 40;
  for (int turn = 0; turn < 20; ++turn) {
    FileToSave file{"rank", {}};
    std::vector<at::Tensor> live;
    std::vector<int64_t> bucket_of;
    for (int64_t b = 0; b < kBuckets; ++b) {
      live.push_back(at::full({100000}, static_cast<double>(b), at::kFloat));
      file.tensors.push_back({{}, live.back()});
      bucket_of.push_back(b);
    }
    ShardCopies copies(kBuckets);
    std::thread copying([&] { copies.copy(file, bucket_of); });
    for (int64_t b = kBuckets - 1; b >= 0; --b) {
      copies.wait(b);
      live[b].fill_(-1);
    }
    copying.join();
    for (int64_t b = 0; b < kBuckets; ++b) {
      EXPECT_TRUE(file.tensors[b].tensor.eq(static_cast<double>(b)).all().item<bool>()) << b;
    }
  }
}

TEST(ShardCopiesTest, NothingIsWaitedForBeforeItsTurnOrAfterAnError) {
  ShardCopies copies(2);
  auto waiting = std::async(std::launch::async, [&] { copies.wait(1); });
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  FileToSave file = file_of(2);
  file.tensors[0].tensor = at::Tensor();  // cannot be copied
  EXPECT_FALSE(error_of([&] { copies.copy(file, {0, 1}); }).empty());
  EXPECT_EQ(waiting.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  copies.wait_for_all();
}

}  // namespace
}  // namespace zero
