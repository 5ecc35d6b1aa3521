// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Makes NCCL transports: GPU memory, the transport of gradients and parameters
// on CUDA. Without CUDA (no --config=cuda) these functions exist, find no GPU
// and refuse.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

namespace zero {

// GPUs this process can see; 0 when built without CUDA or without a driver.
int cuda_device_count();

// Collective over the ranks 0..world_size-1 that share `store`, which must hold
// nothing of another transport, each with its own `device`. Connects at once,
// so that a rank that is missing is an error here and not in the first step.
// Works on a stream of high priority: communication that waits behind the
// backward pass's kernels would overlap nothing.
//
// After `timeout`, which bounds every operation, NCCL's watchdog reports what
// hung and ends the process, unless TORCH_NCCL_ASYNC_ERROR_HANDLING says
// otherwise: a kernel that waits for a dead peer cannot be left behind.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size, c10::Device device,
                                                    std::chrono::milliseconds timeout);

}  // namespace zero
