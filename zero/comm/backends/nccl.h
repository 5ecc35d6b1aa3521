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
#include <cstdlib>
#include <functional>
#include <string>

namespace zero {

// GPUs this process can see; 0 when built without CUDA or without a driver.
int cuda_device_count();

// Returns which of these environment variables makes libtorch break what is promised over NCCL, and
// why; empty if none does. `variable` returns the value of one, or null. Needs no CUDA.
std::string nccl_environment_problem(const std::function<const char*(const char*)>& variable =
                                         [](const char* name) { return std::getenv(name); });

// Returns whether TORCH_NCCL_ASYNC_ERROR_HANDLING is torchrun's own 1, which it gives to each rank
// where its user has set nothing, and with which libtorch ends the process. Needs no CUDA.
bool torchrun_chose_error_handling(const std::function<const char*(const char*)>& variable =
                                       [](const char* name) { return std::getenv(name); });

// Returns the timeout of operations over NCCL in a group with this one: a second longer, since
// control messages, which name the ranks that are missing, have that itself and should be the first
// to end. They are not where a rank comes to its next call later than that after a collective.
std::chrono::milliseconds nccl_timeout(std::chrono::milliseconds timeout);

// Collective over the ranks 0..world_size-1 that share `store`, which must hold
// nothing of another transport, each with its own `device`. Connects at once,
// so that a rank that is missing is an error here and not in the first step.
// Works on a stream of high priority: communication that waits behind the
// backward pass's kernels would overlap nothing.
//
// Backend::getError() says when a connection failed or an operation was not done
// within nccl_timeout(timeout). libtorch's watchdog would end the process for
// that, before anyone could catch the error: the first call sets
// TORCH_NCCL_ASYNC_ERROR_HANDLING, TORCH_NCCL_DUMP_ON_TIMEOUT and
// TORCH_NCCL_ENABLE_MONITORING to 0 and TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC to 10
// for this process, except where they are set. The 1 of torchrun_chose_error_handling()
// counts as not set; 3 lets libtorch end the process also there.
//
// Throws c10::Error where libtorch was compiled for another version of NCCL, and what
// nccl_environment_problem() returns.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size, c10::Device device,
                                                    std::chrono::milliseconds timeout);

// A name of a GPU in the whole world. NCCL takes one GPU for one rank, except
// where NCCL_HOSTID says that ranks are on different machines: it is in the name.
std::string gpu_name(c10::Device device);

}  // namespace zero
