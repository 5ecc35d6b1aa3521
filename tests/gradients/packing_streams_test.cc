// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Gradients that arrive on several streams of a device. Autograd brings those of one backward pass
// on one stream; a caller of torch::autograd::grad(), or a pass on another stream than the one
// before, does not.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "tests/support/device/emulated_device.h"
#include "tests/support/device/emulated_network.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "tests/support/reducer_options.h"
#include "zero/base/streams.h"
#include "zero/communicator.h"
#include "zero/gradients/gradient_reducer.h"

namespace zero {
namespace {

constexpr int64_t kNumel = 64;

// Packs parameter 1 on a stream that is late, and then, on the current one, parameter 0 or, when
// the bucket is sent as it is, nothing.
void expect_late_gradient(const Group& group, bool full) {
  const at::Device device = group.device();
  const c10::DeviceGuard here(device);
  const auto zeros = [&] { return at::zeros({kNumel}, at::TensorOptions().device(device)); };
  FlatModel flat({zeros(), zeros()}, group.world_size(), {Layout::kContiguous, 1 << 16});
  ASSERT_EQ(flat.buckets(), 1);
  BufferPool pool(device, 1 << 20);
  const auto data = group.make_communicator("data", Purpose::kData);
  GradientReducer reducer(flat.plan, flat.table, {{data.get(), nullptr, 0}}, pool,
                          reducer_options(flat.plan));
  // The same on all ranks, so that their mean is it. Kept: another stream reads them.
  std::vector<at::Tensor> gradients;
  for (uint64_t p = 0; p < 2; ++p) {
    gradients.push_back(random_tensor({kNumel}, p + 1).mul_(64).round_().to(device));
    if (full || p == 1) flat.model.values[p].mutable_grad() = gradients.back();
  }
  const c10::Stream late = new_stream(device);
  make_wait(late, current_torch_stream(device));
  {
    const c10::StreamGuard guard(late);
    emulated::enqueue(late, [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
    reducer.gradient_ready(1);
  }
  if (full) reducer.gradient_ready(0);
  reducer.complete(reducer.rounds_needed());
  for (const Segment& s : flat.plan.segments(0, group.rank())) {
    if (!full && s.parameter == 0) continue;
    const at::Tensor got = reducer.shard(0).narrow(0, s.offset, s.numel).to(at::kCPU);
    EXPECT_TRUE(at::equal(got, part_of(gradients[s.parameter].to(at::kCPU), s)))
        << "parameter " << s.parameter << " on rank " << group.rank() << " of "
        << group.world_size();
  }
}

TEST(PackingStreamsTest, AFullBucketWaitsForEveryStreamThatPackedIntoIt) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_device_ranks(ranks, [](const Group& group) { expect_late_gradient(group, true); });
  }
}

TEST(PackingStreamsTest, ABucketOfAClosedRoundWaitsForEveryStreamThatPackedIntoIt) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_device_ranks(ranks, [](const Group& group) { expect_late_gradient(group, false); });
  }
}

}  // namespace
}  // namespace zero
