// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Backends that behave as NCCL does where it fails or ends: an error that no operation reports, and
// an end that waits for the device, so for other communicators, or for ever.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <climits>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "zero/communicator.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// What the test decides and sees.
struct Device {
  std::atomic<c10d::ErrorType> error = c10d::ErrorType::SUCCESS;
  std::atomic<int> looks = 0;  // at it
  int looks_with_error = INT_MAX;
  std::atomic<int> ends = 0;  // begun
  std::promise<void> idle;
  std::shared_future<void> ready = idle.get_future().share();
};

class DeviceBackend : public c10d::Backend {
 public:
  explicit DeviceBackend(std::shared_ptr<Device> device)
      : Backend(0, 2), device_(std::move(device)) {
    setBoundDeviceId(c10::Device(at::kCUDA, 0));
  }
  const std::string getBackendName() const override { return "device"; }
  c10d::ErrorType getError() override {
    if (device_->looks++ < device_->looks_with_error) return device_->error;
    return c10d::ErrorType::SUCCESS;
  }
  void abort() override { end(); }
  void shutdown() override { end(); }

 private:
  void end() {
    ++device_->ends;
    device_->ready.wait();
  }
  const std::shared_ptr<Device> device_;
};

std::unique_ptr<Communicator> communicator_on(const std::shared_ptr<Device>& device,
                                              milliseconds timeout = seconds(60)) {
  return std::make_unique<Communicator>(c10::make_intrusive<DeviceBackend>(device), "test", timeout,
                                        RowTransport::kWhole);
}

// For what a fault would hold up for ever.
constexpr seconds kLong{30};

// Returns whether call() returns while the device is busy. It is idle then.
bool returns(Device& device, const std::function<void()>& call) {
  const auto done = std::async(std::launch::async, call);
  const bool returned = done.wait_for(kLong) == std::future_status::ready;
  device.idle.set_value();
  return returned;
}

void await_ends(const Device& device, int count) {
  const auto limit = std::chrono::steady_clock::now() + kLong;
  while (device.ends < count && std::chrono::steady_clock::now() < limit) {
    std::this_thread::yield();
  }
  EXPECT_EQ(device.ends, count);
}

TEST(BackendEndTest, AnErrorThatNoOperationReportsIsAFailure) {
  for (const auto error : {c10d::ErrorType::TIMEOUT, c10d::ErrorType::COMM_ERROR}) {
    const auto device = std::make_shared<Device>();
    device->idle.set_value();
    const auto ranks = communicator_on(device);
    std::promise<std::string> reported;
    ranks->on_failure([&](const std::string& reason) { reported.set_value(reason); });
    device->error = error;
    auto report = reported.get_future();
    ASSERT_EQ(report.wait_for(kLong), std::future_status::ready);
    const std::string reason = report.get();
    const bool late = error == c10d::ErrorType::TIMEOUT;
    for (const char* text : {"not done in time", "raise the group's timeout of "}) {
      EXPECT_EQ(reason.find(text) != std::string::npos, late) << reason;
    }
    for (const char* text : {"connection", "failed first"}) {
      EXPECT_EQ(reason.find(text) != std::string::npos, !late) << reason;
    }
    EXPECT_NE(reason.find("rank 0 of 2 in group \"test\""), std::string::npos) << reason;
    EXPECT_EQ(ranks->failed(), reason);
  }
}

// An operation has reported it, and names the rank.
TEST(BackendEndTest, AnErrorThatPassesIsNoFailure) {
  const auto device = std::make_shared<Device>();
  device->idle.set_value();
  device->error = c10d::ErrorType::COMM_ERROR;
  device->looks_with_error = 1;
  const auto ranks = communicator_on(device);
  const auto limit = std::chrono::steady_clock::now() + kLong;
  while (device->looks < 3 && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_GE(device->looks, 3);
  EXPECT_EQ(ranks->failed(), "");
}

TEST(BackendEndTest, NoAbortWaitsForAnother) {
  const auto device = std::make_shared<Device>();
  const auto first = communicator_on(device), second = communicator_on(device);
  EXPECT_TRUE(returns(*device, [&] {
    first->abort("a reason");
    second->abort("a reason");
    await_ends(*device, 2);
  }));
}

TEST(BackendEndTest, ACommunicatorThatDoesNotEndIsLeftBehind) {
  for (const bool failed : {false, true}) {
    const auto device = std::make_shared<Device>();
    auto ranks = communicator_on(device, milliseconds(50));
    EXPECT_TRUE(returns(*device, [&] {
      if (failed) ranks->abort("a reason");
      ranks.reset();
      await_ends(*device, 1);
    }));
  }
}

}  // namespace
}  // namespace zero
