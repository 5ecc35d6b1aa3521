// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint/shard_copies.h: what is copied, in which order, by whom, and who waits for it.
#include "zero/checkpoint/shard_copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/device/emulated_device.h"
#include "tests/support/error_of.h"
#include "zero/base/slow_wait.h"
#include "zero/base/streams.h"
#include "zero/checkpoint/memory_file.h"

namespace zero {
namespace {

using namespace std::chrono_literals;

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
  std::vector<ShardCopy> copies;
};

Shard shard_of(int64_t tensors) {
  Shard shard;
  for (int64_t i = 0; i < tensors; ++i) {
    shard.add(at::full({3}, static_cast<double>(i), at::kFloat), i);
  }
  return shard;
}

void wait(ShardCopies& copies, int64_t bucket, std::chrono::milliseconds timeout = 30s) {
  OwnThreadWait limit("rank 1 of 4 waits for its thread", timeout);
  copies.wait(bucket, limit);
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
      wait(copies, b);
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
  wait(copies, 1);
  for (size_t i = 0; i < 3; ++i) shard.live(i).fill_(-1);
  copies.copy_all();
  EXPECT_EQ(shard.copied(2)[0].item<float>(), 2);
  EXPECT_EQ(shard.copied(1)[0].item<float>(), 1);
  EXPECT_EQ(shard.copied(0)[0].item<float>(), -1) << "copied before its turn";
}

// Memory whose first user stands still, as where a disk with the swapped page does not answer.
class SilentMemory {
 public:
  explicit SilentMemory(int64_t bytes)
      : bytes_(bytes), begin_(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    now = this;
    struct sigaction action = {};
    action.sa_sigaction = [](int, siginfo_t* about, void*) { now->stand_still(about->si_addr); };
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before_);
  }
  ~SilentMemory() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(begin_, bytes_);
  }
  at::Tensor tensor() const { return at::from_blob(begin_, {bytes_}, at::kByte); }
  void await_user() const {
    while (!is_used_) std::this_thread::sleep_for(1ms);
  }
  void answer() { answers_ = true; }

 private:
  // In the handler of the signal: the access is made again after it.
  void stand_still(const void* at) {
    if (at < begin_ || at >= static_cast<char*>(begin_) + bytes_) std::abort();
    is_used_ = true;
    const timespec pause{0, 1000000};
    while (!answers_) nanosleep(&pause, nullptr);
    mprotect(begin_, bytes_, PROT_READ | PROT_WRITE);
  }

  static SilentMemory* now;
  const int64_t bytes_;
  void* const begin_;
  struct sigaction before_ = {};
  std::atomic<bool> is_used_ = false, answers_ = false;
};
SilentMemory* SilentMemory::now = nullptr;

TEST(ShardCopiesTest, AWaitForAThreadThatStandsStillHasALineAndEnds) {
  const std::chrono::milliseconds before = slow_wait_after();
  set_slow_wait_after(500ms);
  SilentMemory silent(1000);
  const at::Tensor copy = at::full({1000}, 0xEE, at::kByte);
  ShardCopies copies({{silent.tensor(), copy, 1}});
  std::thread copying([&] { copies.copy_all(); });
  silent.await_user();
  testing::internal::CaptureStderr();
  const auto start = std::chrono::steady_clock::now();
  expect_words(error_of([&] { wait(copies, 1, 500ms); }),
               {"rank 1 of 4 waits for its thread", "has done nothing for 6 s"});
  EXPECT_GE(std::chrono::steady_clock::now() - start, 5500ms);
  EXPECT_EQ(testing::internal::GetCapturedStderr().find(
                "zero: rank 1 of 4 waits for its thread (up to 500 ms)\n"),
            0U);
  silent.answer();
  wait(copies, 1);
  EXPECT_TRUE(copy.eq(0).all().item<bool>());
  copying.join();
  set_slow_wait_after(before);
}

TEST(ShardCopiesTest, AfterAnErrorNothingIsWaitedForAndTheThreadLearnsOfIt) {
  const auto meta = at::TensorOptions().device(at::kMeta).dtype(at::kFloat);
  ShardCopies copies({{at::empty({2}, meta), at::empty({8}, at::kByte), 1},
                      {at::full({2}, 1, at::kFloat), at::full({8}, 0, at::kByte), 0}});
  wait(copies, 1);
  wait(copies, 0);
  for (int call = 0; call < 2; ++call) {
    EXPECT_FALSE(error_of([&] { copies.copy_all(); }).empty()) << call;
  }
}

// ---- From a device with streams ----

const at::Device kDevice(kEmulated, 0);

class ShardCopiesOfADevice : public ::testing::Test {
 protected:
  void SetUp() override { EmulatedDevice::take_violations(); }
  void TearDown() override {
    EmulatedDevice::check_freed_memory();
    for (const std::string& violation : EmulatedDevice::take_violations()) {
      ADD_FAILURE() << violation;
    }
  }

  static at::Tensor on_device(double value) {
    return at::full({1000}, value, at::kFloat).to(kDevice);
  }
  // Holds the current stream back until the gate opens.
  static emulated::Gate hold() {
    emulated::Gate gate;
    emulated::enqueue(current_torch_stream(kDevice), [gate] { gate.wait("a test"); });
    return gate;
  }
};

TEST_F(ShardCopiesOfADevice, HaveTheBitsOfWhatIsCopied) {
  const std::vector<at::Tensor> values = {
      at::arange(300 * 1000 + 1, at::kFloat), at::arange(10000, at::kLong).reshape({100, 100}).t(),
      at::empty({0, 4}, at::kFloat), at::full({}, 7, at::kLong), at::arange(5, at::kHalf)};
  Shard shard;
  for (size_t i = 0; i < values.size(); ++i) {
    shard.add(values[i].to(kDevice), static_cast<int64_t>(i % 2));
    shard.add(values[i], static_cast<int64_t>(i % 2));  // what is in host memory comes along
  }
  ShardCopies(shard.copies).copy_all();
  for (size_t i = 0; i < shard.copies.size(); ++i) {
    EXPECT_TRUE(shard.copied(i).equal(values[i / 2])) << i;
  }
}

// The device stands still while the host makes the copies and enqueues a change of all buckets. The
// first tensor, of no bucket, is on another device.
TEST_F(ShardCopiesOfADevice, AreOfTheMomentOfTheCallAndTheHostGoesOn) {
  for (int turn = 0; turn < 10; ++turn) {
    Shard shard;
    const at::Tensor now = on_device(-1), later = on_device(-2);
    for (int64_t b = 0; b < 20; ++b) shard.add(on_device(-3), b);
    Shard all;
    all.add(at::full({5}, 4, at::kLong).to(at::Device(kEmulated, 1)), kOfNoBucket);
    all.copies.insert(all.copies.end(), shard.copies.begin(), shard.copies.end());
    const int64_t waits = EmulatedDevice::host_waits(0);
    emulated::Gate gate = hold();
    for (int64_t b = 0; b < 20; ++b) shard.live(b).copy_(now);
    ShardCopies copies(all.copies);
    for (int64_t b = 19; b >= 0; --b) {
      wait(copies, b);
      shard.live(b).copy_(later);
    }
    EXPECT_EQ(EmulatedDevice::host_waits(0), waits);
    EXPECT_FALSE(gate.is_open());
    gate.open();
    copies.copy_all();
    for (int64_t b = 0; b < 20; ++b) {
      EXPECT_TRUE(shard.copied(b).eq(-1).all().item<bool>()) << "turn " << turn << " bucket " << b;
    }
    EXPECT_TRUE(all.copied(0).eq(4).all().item<bool>());
    current_torch_stream(kDevice).synchronize();
  }
}

// The copy of bucket 1 stands still.
TEST_F(ShardCopiesOfADevice, AChangeWaitsForTheCopyOfItsBucketAlone) {
  EmulatedDevice::set_patience(2s);
  SilentMemory silent(4000);
  Shard shard;
  for (int64_t b = 0; b < 4; ++b) shard.add(on_device(static_cast<double>(b)), b);
  shard.copies[1].to = silent.tensor();
  const at::Tensor later = on_device(-1);
  ShardCopies copies(shard.copies);
  for (const int64_t b : {3, 2}) {
    wait(copies, b);
    shard.live(b).copy_(later);
  }
  current_torch_stream(kDevice).synchronize();  // or patience ends
  silent.await_user();
  for (const int64_t b : {1, 0}) {
    wait(copies, b);
    shard.live(b).copy_(later);
  }
  EmulatedDevice::set_patience(20s);
  silent.answer();
  copies.copy_all();
  for (int64_t b = 0; b < 4; ++b) {
    EXPECT_TRUE(shard.copied(b).eq(static_cast<double>(b)).all().item<bool>()) << b;
  }
  current_torch_stream(kDevice).synchronize();
}

// As where an optimizer ends, or gets other masters, meanwhile: the device frees and fills what
// nothing keeps.
TEST_F(ShardCopiesOfADevice, KeepTheirMemoryUntilTheyAreMade) {
  SilentMemory silent(4000);
  at::Tensor to = fresh_memory(4000, kDevice);
  Shard shard;
  shard.add(on_device(3), 3);
  shard.add(on_device(2), 2);
  shard.copies[0].to = silent.tensor();
  shard.copies[1].to = to.narrow(0, 0, 4000);
  const void* const from = shard.live(1).const_data_ptr();
  auto copies = std::make_unique<ShardCopies>(shard.copies);
  silent.await_user();
  shard = {};
  current_torch_stream(kDevice).synchronize();
  EXPECT_EQ(emulated::device_of(from), 0) << "still allocated";
  EXPECT_GT(to.storage().use_count(), 1);
  std::thread answering([&] {
    std::this_thread::sleep_for(20ms);
    silent.answer();
  });
  copies.reset();
  EXPECT_EQ(to.storage().use_count(), 1);
  EXPECT_TRUE(to.view(at::kFloat).eq(2).all().item<bool>()) << "waited for";
  EXPECT_EQ(emulated::device_of(from), -1) << "freed";
  answering.join();
}

// Its tensors may change as soon as the copies are enqueued.
TEST_F(ShardCopiesOfADevice, WhatHasNoBucketIsCopiedBeforeWhatTheCurrentStreamDoesNext) {
  FileToSave file{"rank", {}};
  std::vector<at::Tensor> live;
  for (int64_t i = 0; i < 2; ++i) {
    live.push_back(on_device(1));
    file.tensors.push_back({{"t" + std::to_string(i), "buffer", 0, 1000}, live.back()});
  }
  file.tensors[0].bucket = 0;
  const at::Tensor later = on_device(-1);
  MemoryFileWriter writer(file, "an id", fresh_memory);
  file = {};
  const int64_t waits = EmulatedDevice::host_waits(0);
  emulated::Gate gate = hold();
  const auto copies = writer.copy();
  live[1].copy_(later);
  EXPECT_EQ(EmulatedDevice::host_waits(0), waits);
  gate.open();
  copies->copy_all();
  const at::Tensor bytes = writer.finish().bytes;
  constexpr int64_t kTable = 2 * 8;  // a hash of each
  const at::Tensor values = bytes.slice(0, bytes.numel() - kTable - 8000, bytes.numel() - kTable);
  EXPECT_TRUE(values.clone().view(at::kFloat).eq(1).all().item<bool>());
}

// As buffers of a protected step beside a save, whose shard may take long.
TEST_F(ShardCopiesOfADevice, WhatHasNoBucketWaitsForNoCopiesOfOthers) {
  SilentMemory silent(4000);
  Shard slow;
  slow.add(on_device(0), 0);
  slow.copies[0].to = silent.tensor();
  ShardCopies before(slow.copies);
  silent.await_user();
  Shard shard;
  shard.add(on_device(1), kOfNoBucket);
  ShardCopies copies(shard.copies);
  copies.copy_all();  // which would not return
  EXPECT_TRUE(shard.copied(0).eq(1).all().item<bool>());
  silent.answer();
  before.copy_all();
}

}  // namespace
}  // namespace zero
