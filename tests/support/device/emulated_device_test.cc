// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The emulated device finds what it is there to find.
#include "tests/support/device/emulated_device.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>

#include "kernels/cast.h"
#include "kernels/exact_sum.h"
#include "zero/base/streams.h"

namespace zero {
namespace {

const at::Device kFirst(kEmulated, 0);
const at::Device kSecond(kEmulated, 1);

void sleep_on(const c10::Stream& stream) {
  emulated::enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
}

// Copies `from` to `to` by a kernel on the current stream of the first device.
void copy_by_kernel(const at::Tensor& from, const at::Tensor& to) {
  const c10::Stream stream = current_torch_stream(kFirst);
  kernels::cast_copy(from.const_data_ptr(), at::kFloat, to.mutable_data_ptr(), at::kFloat,
                     from.numel(), nullptr,
                     {true, reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()))});
}

class EmulatedDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override { EmulatedDevice::take_violations(); }
  void TearDown() override { EXPECT_TRUE(EmulatedDevice::take_violations().empty()); }

  static bool violated() {
    EmulatedDevice::check_freed_memory();
    return !EmulatedDevice::take_violations().empty();
  }
};

TEST_F(EmulatedDeviceTest, ComputesAsTheHostDoes) {
  const at::Tensor host = at::arange(12, at::kFloat).view({3, 4});
  const at::Tensor device = host.to(kSecond);
  EXPECT_EQ(device.device(), kSecond);
  EXPECT_TRUE(at::equal(at::mm(device, device.t()).add_(1).cpu(), at::mm(host, host.t()).add_(1)));
  EXPECT_TRUE(at::equal(device.select(1, 2).cpu(), host.select(1, 2)));
  at::Tensor leaf = device.clone().requires_grad_();
  (leaf * leaf).sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad().cpu(), host * 2));
}

TEST_F(EmulatedDeviceTest, AStreamThatDoesNotWaitReadsTooEarly) {
  for (const bool waits : {true, false}) {
    const at::Tensor from = at::ones({100}, kFirst);
    const at::Tensor between = at::zeros({100}, kFirst);
    const at::Tensor to = at::zeros({100}, kFirst);
    const c10::Stream first = new_stream(kFirst);
    const c10::Stream second = new_stream(kFirst);
    {
      const c10::StreamGuard guard(first);
      sleep_on(first);
      copy_by_kernel(from, between);
    }
    if (waits) make_wait(second, first);
    {
      const c10::StreamGuard guard(second);
      copy_by_kernel(between, to);
    }
    make_wait(current_torch_stream(kFirst), second);
    EXPECT_EQ(to.sum().item<double>(), waits ? 100 : 0);
    make_wait(current_torch_stream(kFirst), first);
    from.sum().item<double>();
  }
}

TEST_F(EmulatedDeviceTest, ExactSumsAreThoseOfTheHost) {
  const at::Tensor host = at::arange(1000, at::kFloat);
  const at::Tensor on_host = at::zeros({kernels::kExactNumel}, at::kLong);
  const at::Tensor sum = on_host.to(kFirst);
  const at::Tensor values = host.to(kFirst);
  const at::Tensor value = at::zeros({1}, values.options().dtype(at::kDouble));
  const c10::Stream current = current_torch_stream(kFirst);
  const kernels::Stream stream{true, reinterpret_cast<void*>(static_cast<intptr_t>(current.id()))};
  const auto span_of = [](const at::Tensor& tensor) {
    return kernels::ConstSpan{tensor.const_data_ptr<float>(), tensor.numel()};
  };
  kernels::add_squares_exactly(span_of(host), on_host.mutable_data_ptr<int64_t>(), {});
  kernels::add_squares_exactly(span_of(values), sum.mutable_data_ptr<int64_t>(), stream);
  kernels::value_of_exact_sum(sum.const_data_ptr<int64_t>(), value.mutable_data_ptr<double>(),
                              stream);
  EXPECT_TRUE(at::equal(sum.cpu(), on_host));
  EXPECT_EQ(value.cpu().item<double>(), 999.0 * 1000.0 * 1999.0 / 6.0);
}

TEST_F(EmulatedDeviceTest, AKernelOnAnotherDeviceIsAViolation) {
  const at::Tensor memory = at::ones({4}, kSecond);
  EXPECT_THROW(copy_by_kernel(memory, memory), c10::Error);
  EXPECT_TRUE(violated());
}

// Freed in the order of the stream that allocated it, unless others were recorded.
TEST_F(EmulatedDeviceTest, MemoryIsFreedInTheOrderOfItsStream) {
  for (const bool recorded : {true, false}) {
    const c10::Stream other = new_stream(kFirst);
    const at::Tensor from = at::ones({100}, kFirst);
    at::Tensor to = at::zeros({100}, kFirst);
    {
      const c10::StreamGuard guard(other);
      sleep_on(other);
      copy_by_kernel(from, to);
    }
    if (recorded) to.record_stream(other);
    to.reset();
    current_torch_stream(kFirst).synchronize();
    other.synchronize();
    EXPECT_EQ(violated(), !recorded);
  }
}

TEST_F(EmulatedDeviceTest, CountsWhatTheHostWaitsFor) {
  const at::Tensor tensor = at::ones({4}, kFirst);
  const at::Tensor pinned = at::empty({4}, at::TensorOptions().pinned_memory(true));
  int64_t before = EmulatedDevice::host_waits(0);
  const auto waits = [&] {
    return -std::exchange(before, EmulatedDevice::host_waits(0)) + EmulatedDevice::host_waits(0);
  };
  at::Tensor sum = tensor + tensor;
  sum.mul_(2);
  pinned.copy_(sum, /*non_blocking=*/true);
  EXPECT_EQ(waits(), 0);
  sum.sum().item<float>();
  EXPECT_EQ(waits(), 1);
  sum.cpu();
  EXPECT_EQ(waits(), 1);
  current_torch_stream(kFirst).synchronize();
  EXPECT_EQ(waits(), 1);
}

// As where CUDA is given memory that is not pinned, which it would copy to at once.
TEST_F(EmulatedDeviceTest, ACopyToAnyHostMemoryRunsLateOnRequest) {
  const at::Tensor from = at::ones({4}, kFirst);
  const at::Tensor to = at::zeros({4});
  emulated::Gate gate;
  emulated::enqueue(current_torch_stream(kFirst), [gate] { gate.wait("a test"); });
  to.copy_(from, /*non_blocking=*/true);
  EXPECT_EQ(to[0].item<float>(), 0);
  gate.open();
  current_torch_stream(kFirst).synchronize();
  EXPECT_EQ(to[0].item<float>(), 1);
}

TEST_F(EmulatedDeviceTest, AWaitWithoutAnEndIsADeadlock) {
  EmulatedDevice::set_patience(std::chrono::milliseconds(50));
  const emulated::Gate closed;
  emulated::enqueue(current_torch_stream(kFirst), [closed] { closed.wait("a test"); });
  current_torch_stream(kFirst).synchronize();
  EmulatedDevice::set_patience(std::chrono::seconds(20));
  EXPECT_TRUE(violated());
}

}  // namespace
}  // namespace zero
