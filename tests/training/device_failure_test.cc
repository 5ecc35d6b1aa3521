// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A rank that does not come, on emulated devices whose collectives wait for it as NCCL's do: see
// tests/support/device/emulated_network.h.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/device/emulated_network.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "zero/base/error_text.h"
#include "zero/base/message_probe.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using std::chrono::seconds;

constexpr seconds kTimeout{4};

// Of a rank that was there.
struct Outcome {
  std::string error;
  double took = 0;  // seconds, from the step without the other to the error
};

struct OneWeight {
  OneWeight(const Group& group, const ZeroOptions& options)
      : weight(random_tensor({300}, 1).to(group.device()).requires_grad_()),
        optimizer({{"weight", weight}},
                  std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{weight}, 0.1), group,
                  options) {}
  void step() {
    optimizer.backward(weight.sum());
    optimizer.step();
  }

  const at::Tensor weight;
  ZeroOptimizer optimizer;
};

// All ranks but the last take a step that the last does not take, read a parameter, and step again.
std::vector<Outcome> without_the_last(int ranks, const ZeroOptions& options,
                                      DeviceRunOptions device = {}) {
  device.timeout = kTimeout;
  device.finishes = false;
  std::vector<Outcome> outcomes(static_cast<size_t>(ranks - 1));
  std::latch over(ranks - 1);
  run_device_ranks(
      ranks,
      [&](const Group& group) {
        const c10::DeviceGuard on(group.device());
        OneWeight run(group, options);
        run.step();
        if (group.rank() == ranks - 1) return over.wait();
        const auto begin = std::chrono::steady_clock::now();
        Outcome& outcome = outcomes[static_cast<size_t>(group.rank())];
        outcome.error = error_of([&] {
          run.step();
          run.weight.detach().cpu();
          run.step();
        });
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        outcome.took = took.count();
        over.count_down();
      },
      device);
  return outcomes;
}

void expect_in_time(const std::vector<Outcome>& outcomes, const std::string& words) {
  for (const Outcome& outcome : outcomes) {
    EXPECT_NE(outcome.error.find(words), std::string::npos) << outcome.error;
    EXPECT_LT(outcome.took, 3.0 * kTimeout.count()) << outcome.error;
  }
}

// Control messages name the rank before NCCL's timeout ends.
TEST(DeviceFailureTest, ARankThatDoesNotComeIsNamed) {
  expect_in_time(without_the_last(2, ZeroOptions()), "rank 1");
}

// Two levels are two communicators on each device. Each abort waits for all collectives there.
TEST(DeviceFailureTest, SeveralCommunicatorsEndAtOnce) {
  expect_in_time(without_the_last(4, ZeroOptions(), {.ranks_per_machine = 2}), "rank");
}

// Without control messages nothing but the transport knows that a rank is missing.
TEST(DeviceFailureTest, AHostThatWaitsForTheDeviceGoesOn) {
  expect_in_time(without_the_last(2, ZeroOptions().static_graph(true)), "timeout");
}

// The first sum of gradients connects, and so may fail where another rank dies in a recovery.
TEST(DeviceFailureTest, ARecoveryThatCannotConnectIsTriedAgain) {
  static thread_local bool fails = false;
  message_probe = [](const std::string& what) {
    if (fails && what.find("gradient bucket") != std::string::npos) {
      throw_communication_error("a connection failed");
    }
  };
  std::latch connected(2);
  std::vector<std::string> of_the_aborted;  // nothing waits for the sum that was given up
  run_device_ranks(2,
                   [&](const Group& group) {
                     const c10::DeviceGuard on(group.device());
                     OneWeight run(group, ZeroOptions().protect(1));
                     run.step();
                     const auto own =
                         run.optimizer.group().make_communicator("own", Purpose::kControl);
                     connected.arrive_and_wait();
                     own->abort("as in a test");
                     fails = group.rank() == 1;
                     EXPECT_THROW(run.optimizer.recover(), CommunicationError);
                     fails = false;
                     EXPECT_LE(run.optimizer.recover().steps, 1);
                     run.step();
                   },
                   {.finishes = false, .violations = &of_the_aborted});
  message_probe = nullptr;
}

// An abort lets a step run on with what has arrived by then, and its protected copy too. Of the
// collectives of a step, the emulated device has the host ahead of the last one alone.
TEST(DeviceFailureTest, NoStepIsProtectedBehindAnAbort) {
  static EmulatedNetwork network;
  static std::atomic<bool> breaks = false;
  message_probe = [](const std::string& what) {
    if (breaks && what.find("gather_rows") != std::string::npos) network.break_links();
  };
  std::latch stepped(2);
  std::vector<std::string> of_the_aborted;
  run_device_ranks(2,
                   [&](const Group& group) {
                     const c10::DeviceGuard on(group.device());
                     OneWeight run(group, ZeroOptions().protect(1));
                     run.step();
                     const at::Tensor before = run.weight.detach().cpu();
                     stepped.arrive_and_wait();
                     breaks = true;
                     const std::string error = error_of([&] {
                       run.step();
                       run.step();
                     });
                     EXPECT_NE(error.find("a connection failed"), std::string::npos) << error;
                     // Else recover() might end the copies before they are whole.
                     std::this_thread::sleep_for(std::chrono::milliseconds(500));
                     breaks = false;
                     EXPECT_EQ(run.optimizer.recover().steps, 1);
                     EXPECT_TRUE(at::equal(run.weight.detach().cpu(), before));
                     run.step();
                   },
                   {.finishes = false, .violations = &of_the_aborted, .network = &network});
  message_probe = nullptr;
}

// As of a rank that is stopped between the meeting and the first round.
TEST(DeviceFailureTest, AFirstCollectiveHoldsTheHostNoLongerThanTheTimeout) {
  std::latch over(1);
  std::vector<std::string> of_the_late;
  run_device_ranks(
      2,
      [&](const Group& group) {
        const c10::DeviceGuard on(group.device());
        const auto first = group.make_communicator("first", Purpose::kData);
        if (group.rank() == 1) return over.wait();
        const auto begin = std::chrono::steady_clock::now();
        const at::Tensor values = at::zeros({4}, at::device(group.device()).dtype(at::kLong));
        const std::string error = error_of([&] { first->all_reduce_max(values, "values").wait(); });
        EXPECT_NE(error.find("holds the host"), std::string::npos) << error;
        EXPECT_LT(std::chrono::steady_clock::now() - begin, 3 * kTimeout);
        over.count_down();
      },
      {.timeout = kTimeout, .finishes = false, .violations = &of_the_late});
}

// What they return may be the last that a program asks for.
TEST(DeviceFailureTest, WhatAnAbortLeavesIsNotReturned) {
  for (const bool gradient : {false, true}) {
    EmulatedNetwork network;
    std::latch stepped(2);
    std::vector<std::string> of_the_aborted;
    run_device_ranks(2,
                     [&](const Group& group) {
                       const c10::DeviceGuard on(group.device());
                       OneWeight run(group, ZeroOptions());
                       run.step();
                       if (gradient) run.optimizer.backward(run.weight.sum());
                       run.weight.detach().cpu();
                       stepped.arrive_and_wait();
                       network.break_links();
                       EXPECT_THROW(gradient ? run.optimizer.gradient(run.weight)
                                             : run.optimizer.master(run.weight),
                                    CommunicationError);
                     },
                     {.finishes = false, .violations = &of_the_aborted, .network = &network});
  }
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
