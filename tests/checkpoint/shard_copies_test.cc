// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint/shard_copies.h: what is copied, in which order, by whom, and who waits for it.
#include "zero/checkpoint/shard_copies.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

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
  at::Tensor memory;
  const auto copies = ShardCopies::of(file, {0, 2, ShardCopies::kOfNone, 0, 2}, memory);
  copies->copy_all();
  copies->wait_for_all();
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(file.tensors[i].tensor.is_same(before[i].tensor), i == 2) << i;
    before[i].tensor.fill_(-1);
    EXPECT_EQ(file.tensors[i].tensor[0].item<float>(), i == 2 ? -1 : static_cast<float>(i)) << i;
  }
}

TEST(ShardCopiesTest, CopiesHaveTheBitsAndTheShapeOfWhatIsCopied) {
  const std::vector<at::Tensor> tensors = {
      at::arange(3 * 1000 * 1000 + 1, at::kFloat),                   // several pieces
      at::arange(1000 * 1000, at::kLong).reshape({1000, 1000}).t(),  // strided
      at::empty({0, 4}, at::kFloat),
      at::full({}, 7, at::kLong),  // none, one
      at::arange(5, at::kHalf),
      at::full({3}, 2, at::kComplexDouble),
  };
  FileToSave file{"rank", {}};
  for (const at::Tensor& t : tensors) file.tensors.push_back({{}, t});
  at::Tensor memory;
  ShardCopies::of(file, {0, 1, 0, 1, 0, 1}, memory)->copy_all();
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(file.tensors[i].tensor.equal(tensors[i])) << i;
    EXPECT_EQ(file.tensors[i].tensor.scalar_type(), tensors[i].scalar_type()) << i;
    EXPECT_TRUE(file.tensors[i].tensor.is_contiguous()) << i;
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
    at::Tensor memory;
    const auto copies = ShardCopies::of(file, bucket_of, memory);
    std::thread copying([&] { copies->copy_all(); });
    for (int64_t b = kBuckets - 1; b >= 0; --b) {
      copies->wait(b);
      live[b].fill_(-1);
    }
    copying.join();
    for (int64_t b = 0; b < kBuckets; ++b) {
      EXPECT_TRUE(file.tensors[b].tensor.eq(static_cast<double>(b)).all().item<bool>()) << b;
    }
  }
}

// No thread copies here.
TEST(ShardCopiesTest, AStepThatIsAheadCopiesItsBucketItselfAndNoOther) {
  FileToSave file = file_of(3);
  const std::vector<TensorToSave> live = file.tensors;
  at::Tensor memory;
  const auto copies = ShardCopies::of(file, {0, 1, 2}, memory);
  copies->wait(1);
  for (const TensorToSave& t : live) t.tensor.fill_(-1);
  copies->copy_all();
  EXPECT_EQ(file.tensors[2].tensor[0].item<float>(), 2);
  EXPECT_EQ(file.tensors[1].tensor[0].item<float>(), 1);
  EXPECT_EQ(file.tensors[0].tensor[0].item<float>(), -1) << "copied before its turn";
}

TEST(ShardCopiesTest, MemoryIsTakenAgainWhenNothingIsInItAnyMore) {
  at::Tensor memory;
  FileToSave first = file_of(2), second = file_of(2), third = file_of(2), larger = file_of(40);
  ShardCopies::of(first, {0, 1}, memory)->copy_all();
  const void* const before = memory.const_data_ptr();
  ShardCopies::of(second, {0, 1}, memory)->copy_all();
  EXPECT_NE(memory.const_data_ptr(), before) << "the first save is not written yet";
  first.tensors[0].tensor.fill_(-1);
  EXPECT_EQ(second.tensors[0].tensor[0].item<float>(), 0);
  const void* const seconds = memory.const_data_ptr();
  second.tensors.clear();
  ShardCopies::of(third, {0, 1}, memory)->copy_all();
  EXPECT_EQ(memory.const_data_ptr(), seconds);
  third.tensors.clear();
  ShardCopies::of(larger, std::vector<int64_t>(40, 0), memory)->copy_all();
  EXPECT_EQ(larger.tensors[39].tensor[0].item<float>(), 39);
}

TEST(ShardCopiesTest, AfterAnErrorNothingIsWaitedForAndTheThreadLearnsOfIt) {
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kFloat);
  ShardCopies copies({{at::empty({2}, meta), at::empty({2}, at::kFloat), 1},
                      {at::full({2}, 1, at::kFloat), at::full({2}, 0, at::kFloat), 0}});
  copies.wait(1);
  copies.wait_for_all();
  for (int call = 0; call < 2; ++call) {
    EXPECT_FALSE(error_of([&] { copies.copy_all(); }).empty()) << call;
  }
}

// The system's description of the mapping at `address`: "hg" is in it where huge pages are asked
// for. Empty where the system does not tell.
std::string mapping_flags(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool within = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream text(line);
    if (text >> std::hex >> begin >> dash >> end && dash == '-') {
      const auto at = reinterpret_cast<uintptr_t>(address);
      within = begin <= at && at < end;
    }
    if (within && line.compare(0, 8, "VmFlags:") == 0) return line;
  }
  return {};
}

TEST(ShardCopiesTest, ALargeBlockOfFreshMemoryAsksForHugePagesAndIsFreed) {
  constexpr int64_t kBytes = (int64_t{8} << 20) + 5;
  at::Tensor memory = fresh_memory(kBytes);
  EXPECT_EQ(memory.numel(), kBytes);
  memory.fill_(3);
  const void* const address = memory.const_data_ptr();
  const std::string flags = mapping_flags(address);
  if (access("/sys/kernel/mm/transparent_hugepage", F_OK) == 0 && !flags.empty()) {
    EXPECT_NE(flags.find(" hg"), std::string::npos) << flags;
  }
  EXPECT_EQ(fresh_memory(100).numel(), 100);
  EXPECT_EQ(fresh_memory(0).numel(), 0);
  const at::Tensor view = memory.narrow(0, 4, 8).view(at::kInt);
  memory.reset();
  EXPECT_EQ(view[0].item<int>(), 0x03030303) << "a view keeps it";
}

}  // namespace
}  // namespace zero
