// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Collectives of several communicators on a device that has room for one of them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "zero/base/streams.h"
#include "zero/comm/row_communicator.h"
#include "zero/communicator.h"

namespace zero {
namespace {

constexpr int kRounds = 6;

// Starts a maximum over each communicator in turn, each on a stream of its own, and waits for none
// before all are started. On each rank another stream is late. Returns whether all got their
// maxima.
bool run_rounds(const Group& group, const std::vector<Communicator*>& communicators) {
  const c10::Device device = group.device();
  const auto options = at::TensorOptions(at::kLong).device(device);
  std::vector<c10::Stream> streams;
  for (size_t i = 0; i < communicators.size(); ++i) streams.push_back(new_stream(device));
  bool right = true;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<at::Tensor> values;
    std::vector<Pending> pending;
    for (size_t i = 0; i < communicators.size(); ++i) {
      const c10::StreamGuard guard(streams[i]);
      values.push_back(at::full({4}, group.rank() + 10 * round, options));
      if (static_cast<int>(i) == (group.rank() + round) % group.world_size()) {
        emulated::enqueue(streams[i],
                          [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
      }
      pending.push_back(communicators[i]->all_reduce_max(values.back(), "values"));
    }
    for (size_t i = 0; i < communicators.size(); ++i) {
      const c10::StreamGuard guard(streams[i]);
      pending[i].wait();
      right = right && values[i][0].item<int64_t>() == group.world_size() - 1 + 10 * round;
    }
  }
  return right;
}

using Communicators = std::vector<std::unique_ptr<Communicator>>;

Communicators communicators_of(const Group& group) {
  Communicators made;
  for (const char* name : {"a", "b", "c"}) {
    made.push_back(group.make_communicator(name, Purpose::kData));
  }
  return made;
}

std::vector<Communicator*> pointers(const Communicators& communicators) {
  std::vector<Communicator*> result;
  for (const auto& c : communicators) result.push_back(c.get());
  return result;
}

TEST(CollectiveOrderTest, CommunicatorsInOneOrderNeedRoomForOneCollective) {
  for (const int ranks_per_machine : {0, 2}) {
    run_device_ranks(4,
                     [](const Group& group) {
                       const c10::DeviceGuard here(group.device());
                       const Communicators made = communicators_of(group);
                       RowCommunicator::put_in_one_order(pointers(made));
                       EXPECT_TRUE(run_rounds(group, pointers(made)));
                     },
                     {.ranks_per_machine = ranks_per_machine});
  }
}

// The first call of each connects, one after the other, so that all may wait for their streams.
TEST(CollectiveOrderTest, CommunicatorsWithoutAnOrderWaitForEachOthersRoom) {
  std::vector<std::string> violations;
  EmulatedDevice::set_patience(std::chrono::milliseconds(500));
  const auto run = [](const Group& group) {
    const c10::DeviceGuard here(group.device());
    const Communicators made = communicators_of(group);
    const auto options = at::TensorOptions(at::kLong).device(group.device());
    for (const auto& c : made) c->all_reduce_max(at::full({4}, 1, options), "first").wait();
    try {
      run_rounds(group, pointers(made));
    } catch (const std::exception&) {  // of a communicator that a deadlock has ended
    }
  };
  run_device_ranks(2, run, {.violations = &violations});
  EmulatedDevice::set_patience(std::chrono::seconds(20));
  const auto found = [&](const std::string& text) {
    return std::ranges::any_of(
        violations, [&](const std::string& v) { return v.find(text) != std::string::npos; });
  };
  EXPECT_TRUE(found("deadlock: allreduce"));
  EXPECT_TRUE(found("one order:"));
}

// As where an exception leaves one behind: peers may still read and write.
TEST(CollectiveOrderTest, MemoryOfACollectiveThatNobodyWaitsForIsKept) {
  run_device_ranks(2, [](const Group& group) {
    const c10::DeviceGuard here(group.device());
    const Communicators made = communicators_of(group);
    RowCommunicator::put_in_one_order(pointers(made));
    const auto options = at::TensorOptions(at::kLong).device(group.device());
    made.front()->all_reduce_max(at::full({4}, 1, options), "dropped");
  });
}

// Ranks with different numbers of passes start those of two owners in different orders: nothing may
// put them into one, and each owner has a place.
TEST(CollectiveOrderTest, OwnersWithoutACommonOrderHoldUpNoOneWithRoomForBoth) {
  run_device_ranks(2,
                   [](const Group& group) {
                     const c10::Device device = group.device();
                     const c10::DeviceGuard here(device);
                     const auto data = [&](const char* name) {
                       return group.make_communicator(name, Purpose::kData);
                     };
                     const auto options = at::TensorOptions(at::kLong).device(device);
                     const auto first = data("a"), second = data("b"), third = data("c"),
                                fourth = data("d");
                     RowCommunicator::put_in_one_order({first.get(), second.get()});
                     RowCommunicator::put_in_one_order({third.get(), fourth.get()});
                     const auto all = {first.get(), second.get(), third.get(), fourth.get()};
                     for (Communicator* c : all)
                       c->all_reduce_max(at::full({4}, 1, options), "first").wait();
                     std::vector<Communicator*> order(all);
                     if (group.rank() == 1) std::ranges::rotate(order, order.begin() + 2);
                     std::vector<Pending> pending;
                     const at::Tensor values = at::full({4, 4}, group.rank(), options);
                     for (int i = 0; i < 4; ++i) {
                       pending.push_back(order[i]->all_reduce_max(values.select(0, i), "values"));
                     }
                     for (Pending& p : pending) p.wait();
                     EXPECT_EQ(values.min().item<int64_t>(), 1);
                   },
                   {.room = 2});
}

}  // namespace
}  // namespace zero
