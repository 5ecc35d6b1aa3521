// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint/shard_copies.h: what is copied, in which order, by whom, and who waits for it.
#include "zero/checkpoint/shard_copies.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

// Tensors with buckets, and the bytes of their copies.
struct Shard {
  void add(const at::Tensor& tensor, int64_t bucket) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    copies.push_back({tensor, at::full({bytes}, 0xEE, at::kByte), bucket});
  }
  const at::Tensor& live(size_t i) const { return copies[i].from; }
  at::Tensor copied(size_t i) const {
    const at::Tensor& from = live(i);
    return copies[i].to.view(from.scalar_type()).view(from.sizes());
  }
  std::vector<ShardCopies::Copy> copies;
};

Shard shard_of(int64_t tensors) {
  Shard shard;
  for (int64_t i = 0; i < tensors; ++i) {
    shard.add(at::full({3}, static_cast<double>(i), at::kFloat), i);
  }
  return shard;
}

TEST(ShardCopiesTest, CopiesHaveTheBitsOfWhatIsCopied) {
  Shard shard;
  shard.add(at::arange(3 * 1000 * 1000 + 1, at::kFloat), 0);                   // several pieces
  shard.add(at::arange(1000 * 1000, at::kLong).reshape({1000, 1000}).t(), 1);  // strided
  shard.add(at::empty({0, 4}, at::kFloat), 0);
  shard.add(at::full({}, 7, at::kLong), 1);
  shard.add(at::arange(5, at::kHalf), 0);
  shard.add(at::full({3}, 2, at::kComplexDouble), 1);
  ShardCopies(shard.copies).copy_all();
  for (size_t i = 0; i < shard.copies.size(); ++i) {
    EXPECT_TRUE(shard.copied(i).equal(shard.live(i))) << i;
  }
}

// Copies go to any place in a file, with any number of bytes.
TEST(ShardCopiesTest, ACopyFillsItsPlaceAndNothingBesideIt) {
  const at::Tensor from = at::arange(600, at::kInt).remainder(251).to(at::kByte);
  for (int64_t begin = 0; begin <= 70; ++begin) {
    for (const int64_t bytes : {0, 1, 15, 63, 64, 65, 128, 129, 400}) {
      const at::Tensor to = at::full({600}, 0xEE, at::kByte);
      const at::Tensor source = from.narrow(0, begin % 13, bytes);
      ShardCopies({{source, to.narrow(0, begin, bytes), 0}}).copy_all();
      EXPECT_TRUE(to.narrow(0, begin, bytes).equal(source)) << begin << " " << bytes;
      EXPECT_TRUE(to.narrow(0, 0, begin).eq(0xEE).all().item<bool>()) << begin << " " << bytes;
      EXPECT_TRUE(to.slice(0, begin + bytes).eq(0xEE).all().item<bool>()) << begin << " " << bytes;
    }
  }
}

// Each bucket is changed as soon as wait() returns, and no copy has a new value.
TEST(ShardCopiesTest, AChangeWaitsForTheCopyOfItsBucketAlone) {
  constexpr int64_t kBuckets = 40;
  for (int turn = 0; turn < 20; ++turn) {
    Shard shard;
    for (int64_t b = 0; b < kBuckets; ++b) {
      shard.add(at::full({100000}, static_cast<double>(b), at::kFloat), b);
    }
    ShardCopies copies(shard.copies);
    std::thread copying([&] { copies.copy_all(); });
    for (int64_t b = kBuckets - 1; b >= 0; --b) {
      copies.wait(b);
      shard.live(b).fill_(-1);
    }
    copying.join();
    for (int64_t b = 0; b < kBuckets; ++b) {
      EXPECT_TRUE(shard.copied(b).eq(static_cast<double>(b)).all().item<bool>()) << b;
    }
  }
}

// No thread copies here.
TEST(ShardCopiesTest, AStepThatIsAheadCopiesItsBucketItselfAndNoOther) {
  const Shard shard = shard_of(3);
  ShardCopies copies(shard.copies);
  copies.wait(1);
  for (size_t i = 0; i < 3; ++i) shard.live(i).fill_(-1);
  copies.copy_all();
  EXPECT_EQ(shard.copied(2)[0].item<float>(), 2);
  EXPECT_EQ(shard.copied(1)[0].item<float>(), 1);
  EXPECT_EQ(shard.copied(0)[0].item<float>(), -1) << "copied before its turn";
}

TEST(ShardCopiesTest, AfterAnErrorNothingIsWaitedForAndTheThreadLearnsOfIt) {
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kFloat);
  ShardCopies copies({{at::empty({2}, meta), at::empty({8}, at::kByte), 1},
                      {at::full({2}, 1, at::kFloat), at::full({8}, 0, at::kByte), 0}});
  copies.wait(1);
  copies.wait(0);
  for (int call = 0; call < 2; ++call) {
    EXPECT_FALSE(error_of([&] { copies.copy_all(); }).empty()) << call;
  }
}

}  // namespace
}  // namespace zero
