// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Optimizers that cannot be made: the check of their descriptions costs what reading them costs,
// and a lack of memory on one rank is an error on all.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/agreement/construction_check.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

// In quadratic time this would be 10 minutes.
TEST(ConstructionCheck, AHundredThousandLinesAreReadOnce) {
  const auto start = std::chrono::steady_clock::now();
  run_ranks(2, [](const Group& group) {
    const auto ranks = group.make_communicator("check", Purpose::kControl);
    std::vector<std::string> lines(100000, "parameter with a name and a shape");
    lines.push_back("the last one of rank " + std::to_string(group.rank()));
    expect_words(error_of([&] { check_construction(*ranks, "", lines); }),
                 {"rank 0: the last one of rank 0", "rank 1: the last one of rank 1"});
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

// Tensors of one thread cannot be allocated from the `fails_at`-th on (1: the next one) for
// `failures` times; 0: all can.
struct Countdown {
  int fails_at = 0;
  int failures = 0;
};
thread_local Countdown countdown;

class FailingAllocator : public c10::Allocator {
 public:
  explicit FailingAllocator(c10::Allocator* under) : under_(under) {}
  c10::DataPtr allocate(size_t bytes) override {
    if (countdown.fails_at > 0 && --countdown.fails_at == 0) {
      ++countdown.failures;
      throw std::bad_alloc();
    }
    return under_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return under_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    under_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const under_;
};

// While one lives, CPU tensors are made by a FailingAllocator.
class FailingAllocations {
 public:
  FailingAllocations() : before_(c10::GetAllocator(c10::kCPU)), failing_(before_) {
    c10::SetAllocator(c10::kCPU, &failing_, 1);
  }
  ~FailingAllocations() { c10::SetAllocator(c10::kCPU, before_, 1); }
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

 private:
  c10::Allocator* const before_;
  FailingAllocator failing_;
};

// Every allocation of the last rank's constructor fails once. Nothing but c10::Error is thrown, on
// any rank.
void fail_each_allocation(int world_size) {
  constexpr milliseconds kTimeout{5000};
  int failing = 0;
  int told = 0;
  int waited = 0;
  for (bool failed = true; failed; ++failing) {
    failed = false;
    std::vector<std::string> errors(world_size);  // by rank
    const auto start = std::chrono::steady_clock::now();
    run_ranks(world_size,
              [&](const Group& group) {
                const bool last = group.rank() == world_size - 1;
                OddModel model{1};
                auto inner = make_inner(Inner::kAdamW, *model);
                std::unique_ptr<ZeroOptimizer> optimizer;
                if (last) countdown = {failing + 1, 0};
                const std::string text = error_of([&] {
                  optimizer = std::make_unique<ZeroOptimizer>(*model, std::move(inner), group);
                  if (last) failed = std::exchange(countdown, {}).failures > 0;
                  // The last rank may fail after the others have made theirs.
                  optimizer->check_replicas();
                });
                if (last) failed = failed || std::exchange(countdown, {}).failures > 0;
                errors[group.rank()] = text;
              },
              {.transport = Transport::kGloo, .timeout = kTimeout});
    SCOPED_TRACE("allocation " + std::to_string(failing) + " of " + std::to_string(world_size) +
                 " ranks");
    bool all_know = failed;
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(errors[rank].empty(), !failed);
      if (failed) expect_words(errors[rank], {"rank " + std::to_string(rank)});
      all_know = all_know && errors[rank].find("out of memory") != std::string::npos;
    }
    told += all_know;
    waited += std::chrono::steady_clock::now() - start >= kTimeout;
  }
  EXPECT_GE(failing, 4) << "the constructor allocates more";
  EXPECT_GE(told, failing / 3) << "many errors give the reason on all ranks";
  EXPECT_LE(waited, 1) << "between the check and the next communicator nothing is connected";
}

// All at once: one allocation of each is a timeout.
TEST(Construction, AFailedAllocationIsAnErrorOnAllRanks) {
  const FailingAllocations allocations;
  std::vector<std::future<void>> all;
  for (const int world_size : {1, 2, 3}) {
    all.push_back(std::async(std::launch::async, fail_each_allocation, world_size));
  }
  for (std::future<void>& one : all) one.get();
}

}  // namespace
}  // namespace zero
