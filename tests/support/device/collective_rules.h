// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What NCCL and ProcessGroupNCCL ask of those who call collectives, checked on a record of calls.
// So a fault is found whatever the streams of that run happened to do first.
//
//   same calls    All ranks of a communicator call the same collectives, with equal sizes, dtypes,
//                 operations, roots and splits, in the same order. [NCCL, "Collective Operations"]
//   one order     On a device a collective begins when those of other communicators have ended.
//                 [NCCL, "Using multiple NCCL communicators concurrently"]
//   memory        Where input and output overlap, they are in place: one buffer, or for an
//                 all-gather and a reduce-scatter the row of the rank. An all-to-all has no such
//                 form. [NCCL, "In-place Operations"] Pointers are multiples of their dtype's size.
//   dtypes        Those of NCCL, summed or maximal; there is no bitwise OR, and a maximum of floats
//                 may lose a NaN. [NCCL, "Types"]
//   streams       Memory of a collective is used by kernels, copies and other collectives only in
//                 stream order before it or after it. [NCCL, "CUDA Stream Semantics"]
//   lifetime      Memory goes back to the allocator only where a stream that it waits for, its own
//                 or one of record_stream(), has waited for the collective: ProcessGroupNCCL keeps
//                 tensors until Work::wait(), and no longer. [ProcessGroupNCCL.hpp of libtorch 2.9
//                 to 2.15, TORCH_NCCL_AVOID_RECORD_STREAMS and TensorShelf]
//   waits         Every Work is waited for. [ProcessGroupNCCL.hpp, WorkNCCL::wait()]
//
// NCCL is its user guide, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/.
#pragma once

#include <string>
#include <vector>

#include "tests/support/device/device_calls.h"

namespace zero {

struct CollectiveRules {
  bool one_order = true;  // false: the device has room for several collectives
  bool finished = true;   // false: a rank failed, so that calls may be missing on some
};

// Returns what is broken, one sentence each, that begins with the rule's name above.
std::vector<std::string> broken_rules(const std::vector<DeviceCall>& calls,
                                      const CollectiveRules& rules = {});

}  // namespace zero
