// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The reduction queue alone: how long a peer that takes no part may hold up the thread that pushes,
// and who learns of an error that only one rank has.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <new>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/agreement/communicators.h"
#include "zero/agreement/shard_domains.h"
#include "zero/base/threads.h"
#include "zero/gradients/elementwise_wire.h"
#include "zero/gradients/reduction_queue.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;

struct Buckets {
  Buckets(int count, int64_t row, Communicator& group, BufferPool& pool) {
    for (int b = 0; b < count; ++b) {
      BucketReduction reduction;
      reduction.wire = &wire;
      reduction.rows = Rows(pool.acquire(2 * row, at::kFloat).fill_(b + 1), {2, row});
      reduction.shard = at::zeros({row});
      reduction.group = &group;
      reduction.bucket = b;
      list.push_back(std::move(reduction));
    }
  }
  void push_all(ReductionQueue& queue) {
    for (const BucketReduction& reduction : list) queue.push(reduction);
  }
  const ElementwiseWire wire{at::kFloat};
  std::vector<BucketReduction> list;
};

TEST(ReductionQueueTest, APeerThatTakesNoPartHoldsUpAPassOnceAndNotPerBucket) {
  run_ranks(2, [](const Group& group) {
    const auto data = group.make_communicator("data", Purpose::kData);
    const auto turn = group.make_communicator("turn", Purpose::kControl);
    BufferPool pool(at::kCPU, 1 << 20);
    ReductionQueue queue(pool);
    // Four of the first are 8 MiB, the most that may be under way. 20 ms for each of the others
    // would be 6 s.
    Buckets large(4, 1 << 18, *data, pool), small(300, 8, *data, pool);
    const auto push_all = [&] {
      for (Buckets* buckets : {&large, &small}) buckets->push_all(queue);
    };
    if (group.rank() == 0) {
      const auto start = Clock::now();
      push_all();
      EXPECT_GT(Clock::now() - start, std::chrono::milliseconds(20));
      EXPECT_LT(Clock::now() - start, std::chrono::seconds(3));
    }
    turn->all_reduce_max(at::zeros({1}, at::kInt), "rank 0 has pushed").wait();
    if (group.rank() == 1) push_all();
    queue.drain();
    for (const Buckets* buckets : {&large, &small}) {
      for (const BucketReduction& r : buckets->list) {
        const double sum = 2.0 * (static_cast<double>(r.bucket) + 1);
        EXPECT_TRUE(at::equal(r.shard, at::full({r.shard.numel()}, sum)));
      }
    }
  });
}

TEST(ReductionQueueTest, AnErrorOfOneRankReachesTheOthersAtOnce) {
  for (const int bad : {0, 1}) {
    const auto start = Clock::now();
    run_ranks(2,
              [&](const Group& group) {
                const auto data = group.make_communicator("data", Purpose::kData);
                bool full = false;  // no memory for what a bucket receives
                BufferPool pool(at::kCPU, 0, [&](int64_t) -> at::Tensor {
                  if (full) throw std::bad_alloc();
                  return {};
                });
                ReductionQueue queue(pool);
                Buckets buckets(10, 1 << 14, *data, pool);
                full = group.rank() == bad;
                EXPECT_THROW(
                    {
                      buckets.push_all(queue);
                      queue.drain();
                    },
                    std::exception);
                EXPECT_FALSE(data->failed().empty());
                if (group.rank() == bad) {
                  expect_words(data->failed(),
                               {"a reduction failed on rank " + std::to_string(bad)});
                }
                EXPECT_THROW(queue.check(), std::exception);
              },
              {.transport = kRealTransport, .timeout = std::chrono::seconds(60)});
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  }
}

// As at the limit of processes: the rank that has no thread for its queue works in drain().
TEST(ReductionQueueTest, WithoutAThreadDrainReducesEverything) {
  run_ranks(2, [](const Group& group) {
    const auto data = group.make_communicator("data", Purpose::kData);
    BufferPool pool(at::kCPU, 1 << 20);
    ReductionQueue queue(pool);
    Buckets buckets(9, 1 << 14, *data, pool);
    threads_refused = group.rank() == 1;
    buckets.push_all(queue);
    queue.drain();
    threads_refused = false;
    for (const BucketReduction& r : buckets.list) {
      const double sum = 2.0 * (static_cast<double>(r.bucket) + 1);
      EXPECT_TRUE(at::equal(r.shard, at::full({1 << 14}, sum)));
    }
    buckets.push_all(queue);  // starts the thread
    queue.drain();
  });
}

// A transport whose waits end only when the test says so, whatever their limits and aborts.
class StuckBackend : public c10d::Backend {
 public:
  explicit StuckBackend(std::shared_future<void> end) : Backend(0, 2), end_(std::move(end)) {}
  const std::string getBackendName() const override { return "stuck"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override {
    return c10::make_intrusive<Stuck>(end_);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int, int) override {
    return c10::make_intrusive<Stuck>(end_);
  }
  void abort() override {}
  void shutdown() override {}

 private:
  struct Stuck : c10d::Work {
    explicit Stuck(std::shared_future<void> end) : end_(std::move(end)) {}
    bool wait(std::chrono::milliseconds) override {
      end_.wait();
      return false;
    }
    bool isCompleted() override { return false; }
    void abort() override {}
    const std::shared_future<void> end_;
  };
  const std::shared_future<void> end_;
};

// Its limit is that of a transfer, and 5 s.
TEST(ReductionQueueTest, AWorkerThatStandsStillIsAnErrorOfDrainWithTheStatesOfItsThreads) {
  std::promise<void> end;
  Communicator data(c10::make_intrusive<StuckBackend>(end.get_future().share()), "data",
                    std::chrono::milliseconds(500), RowTransport::kPairwise);
  BufferPool pool(at::kCPU, 1 << 20);
  ReductionQueue queue(pool);
  Buckets buckets(1, 8, data, pool);
  testing::internal::CaptureStderr();
  const auto start = Clock::now();
  buckets.push_all(queue);
  const std::string text = error_of([&] { queue.drain(); });
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(20));
  end.set_value();
  expect_words(text, {"rank 0 of 2 in group \"data\" waits for its thread that reduces gradients",
                      "has done nothing for 6 s"});
  expect_words(testing::internal::GetCapturedStderr(), {"The threads of process"});
  EXPECT_FALSE(data.failed().empty());
  EXPECT_EQ(error_of([&] { queue.drain(); }), text);
}

// The other ranks may wait in any communicator of the optimizer.
TEST(ReductionQueueTest, AFailedCommunicatorClosesItsSiblings) {
  const auto start = Clock::now();
  run_ranks(2,
            [](const Group& group) {
              OptimizerCommunicators comms(group);
              comms.connect(make_domains(group, ZeroOptions(), 1));
              if (group.rank() == 0) {
                comms.home.data->abort("the disk of rank 0 is on fire");
                EXPECT_FALSE(comms.control->failed().empty());
              } else {
                at::Tensor word = at::zeros({1}, at::kInt);
                const std::string text =
                    error_of([&] { comms.control->all_reduce_max(word, "x").wait(); });
                expect_words(text + comms.channel.report_failure(text), {"rank 0", "is on fire"});
              }
            },
            {.timeout = std::chrono::seconds(60)});
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
}

}  // namespace
}  // namespace zero
