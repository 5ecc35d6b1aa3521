// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One order of the collectives of several backends on a device.
//
// A collective of NCCL is a kernel that waits on the device for those of its peers. Kernels of two
// communicators may run at once, and a device has room for so many only: where one rank runs the
// first of two collectives and another rank the second, each may wait for the room that the other
// takes, for ever. NCCL's user guide asks for one order on the devices of all ranks, or for room
// for all ("Using multiple NCCL communicators concurrently"). Here each collective begins on the
// device when the one started before it has ended there.
//
// Thread safety: every member.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace zero {

class CollectiveOrder {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Returns the stream that waits for each collective in turn; of one device.
  c10::Stream stream(c10::Device device);
  // Calls start(), which starts a collective behind the stream that is current then: behind the
  // stream that is current now, and behind all collectives before it. Returns its Work, whose
  // wait() makes the current stream wait for the one of the order.
  //   used  the tensors of the collective, at least one. Their memory is kept until it has ended,
  //         even where the Work is dropped
  WorkPtr run(const std::vector<at::Tensor>& used, const std::function<WorkPtr()>& start);

 private:
  // With the lock held.
  c10::Stream stream_of(c10::Device device);

  std::mutex mutex_;
  std::optional<c10::Stream> stream_;
};

}  // namespace zero
