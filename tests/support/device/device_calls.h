// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A record of what the host asks of emulated devices and of their network, in the order in which it
// asks. tests/support/device/collective_rules.h says what must hold of it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace zero {

// Bytes of a device.
struct DeviceMemory {
  const char* begin = nullptr;
  int64_t bytes = 0;
  bool overlaps(const DeviceMemory& other) const {
    return begin < other.begin + other.bytes && other.begin < begin + bytes;
  }
  bool operator==(const DeviceMemory&) const = default;
};

// A call of a collective of c10d by one rank.
struct CollectiveCall {
  enum class Kind { kAllToAll, kReduceScatter, kAllGather, kAllReduce, kBroadcast };
  Kind kind = Kind::kAllReduce;
  std::string text;  // kind, sizes, dtype, operation, root and splits
  int64_t communicator = 0;
  int64_t number = 0;  // within the communicator
  int rank = 0;        // of the communicator
  int ranks = 1;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  int operation = -1;     // c10d::ReduceOp::RedOpType of kReduceScatter and kAllReduce
  bool connects = false;  // the first of its kind and size, for which the host waits
  DeviceMemory input;
  DeviceMemory output;
};

struct DeviceCall {
  enum class Kind {
    kUse,             // `memory` by a kernel or a copy on `stream`
    kRecord,          // of `event` on `stream`
    kWait,            // of `stream` for `event`
    kHostSawStream,   // the host knows that `stream` has done all it had to do
    kHostSawEvent,    // the same of what is before `event`
    kAllocate,        // of `memory`, for `stream`
    kRecordStream,    // `memory` is used by `stream` too
    kFree,            // of `memory`
    kCollective,      // `collective` begins behind what `stream`, its communicator's, waits for
    kCollectiveWait,  // `stream` waits for the Work of `collective`
    kEnd,             // of the communicator of `collective`, which has not failed
  };
  Kind kind = Kind::kUse;
  int device = 0;
  c10::StreamId stream = 0;
  const void* event = nullptr;
  DeviceMemory memory = {};
  bool writes = false;    // of kUse
  bool waits = false;     // of kHostSawStream and kHostSawEvent: the host did not only ask
  bool captured = false;  // of kWait: in a graph
  // By a thread that runs a backward pass, in a hook or a node. Set by DeviceCalls::add().
  bool in_pass = false;
  c10::StreamId model = 0;  // in a pass: the stream that computes the node
  std::shared_ptr<const CollectiveCall> collective = nullptr;
};

// Thread safety: every member.
class DeviceCalls {
 public:
  // From now on calls are kept; those of before are forgotten.
  static void begin();
  // Returns them, and keeps none from now on.
  static std::vector<DeviceCall> take();
  static void add(DeviceCall call);
};

}  // namespace zero
