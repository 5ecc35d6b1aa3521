// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Once everything has been used, clipping and stepping allocate no memory that grows with the
// model: only the few words of messages.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Of the thread that allocates, since ranks are threads.
thread_local int64_t largest_allocation = 0;

class WatchedAllocator final : public c10::Allocator {
 public:
  explicit WatchedAllocator(c10::Allocator& real) : real_(real) {}
  c10::DataPtr allocate(size_t bytes) override {
    largest_allocation = std::max(largest_allocation, static_cast<int64_t>(bytes));
    return real_.allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return real_.raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    real_.copy_data(to, from, bytes);
  }

 private:
  c10::Allocator& real_;
};

void watch_allocations() {
  static WatchedAllocator watched(*c10::GetCPUAllocator());
  c10::SetCPUAllocator(&watched, /*priority=*/255);
}

// A control message has 56 bytes, and each rank receives those of all.
constexpr int64_t kMessage = 1024;

TEST(AllocationTest, ClippingAndSteppingAllocateNothingThatGrows) {
  watch_allocations();
  for (int world_size : {1, 2, 3}) {
    for (Inner inner : {Inner::kAdamW, Inner::kSgdMomentum}) {
      for (auto dtype : {at::kFloat, at::kBFloat16}) {
        run_ranks(world_size,
                  [&](const Group& group) {
                    OddModel model(1, 300);
                    model->to(dtype);
                    ZeroOptimizer optimizer(*model, make_inner(inner, *model), group,
                                            ZeroOptions().bucket_bytes(20000));
                    for (int step = 0; step < 4; ++step) {
                      optimizer.backward(model->loss(random_tensor({3, 17}, group.rank()).to(dtype),
                                                     random_tensor({3, 11}, 9).to(dtype),
                                                     OddModelImpl::kAll));
                      optimizer.reduce_gradients();
                      largest_allocation = 0;
                      optimizer.clip_grad_norm_(1.0);
                      optimizer.step();
                      if (step == 0) {
                        EXPECT_GT(largest_allocation, kMessage) << "the first step makes the state";
                      } else {
                        EXPECT_LE(largest_allocation, kMessage) << "step " << step;
                      }
                    }
                  },
                  {.transport = kRealTransport});
      }
    }
  }
}

}  // namespace
}  // namespace zero
