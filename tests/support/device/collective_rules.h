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
//   passes        In a backward pass neither the stream of the model nor the host waits for a
//                 collective that began in one: a peer may have no such pass. No collective of a
//                 pass is the first of its kind and size, which connects and holds the host. But
//                 in a capture, where ranks have equal passes, streams may wait. [design.md, "Hooks
//                 that wait for a buffer or a peer"; ncclCollPreconnect() of NCCL]
//   ends          Ranks end the communicators that they share in one order: an end waits for its
//                 peers. [NCCL, "Finalizing a communicator"]
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
