// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A device that behaves like a GPU and runs on the CPU, so that mistakes with streams, devices and
// memory fail a test on every machine. It is libtorch's private-use backend.
//
//   streams     A stream is a thread that runs its work in order and late: the host is far ahead.
//               Kernels of kernels/, copies and collectives run there. Other ATen operations wait
//               until the current stream is empty and then run on the host.
//   memory      It belongs to the stream that was current when it was allocated. Memory that is
//               freed is filled with NaN in the order of that stream, as if it had been given to
//               something else, and is watched for later writes.
//   devices     The current device is per thread, 0 at first. A kernel for memory of another
//               device, or on a stream of another, is a violation.
//   host waits  Everything for which CUDA makes the host wait is counted.
//   graphs      EmulatedGraph captures work of streams, runs none of it, and runs it again in each
//               replay. What CUDA forbids meanwhile is a violation.
//
// It is registered when the program starts. Link :emulated_kernels too: it replaces the CUDA
// kernels by kernels for this device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace zero {

inline constexpr c10::DeviceType kEmulated = c10::DeviceType::PrivateUse1;
inline constexpr int kEmulatedDevices = 8;

// Thread safety: every member.
class EmulatedDevice {
 public:
  // How often the host has waited for work of a device since the process began.
  static int64_t host_waits(int device);
  // Kernels that were launched on a device since the process began.
  static int64_t launches(int device);
  // Bytes copied from a device to the host since the process began.
  static int64_t bytes_to_host(int device);
  // What would have been an error, a race or a deadlock on a GPU, since the last call.
  static std::vector<std::string> take_violations();
  // Looks for writes to memory after it was freed, which take_violations() reports.
  static void check_freed_memory();

  // Returns when all streams have done what they were given. Counts no wait of the host.
  static void finish();

  // Work of a stream begins up to this much later than it could.
  static void set_delay(std::chrono::microseconds longest);
  // A copy to the host for which the host does not wait takes this long.
  static void set_copy_time(std::chrono::microseconds time);
  // Such copies of a device that are not made yet.
  static int64_t copies_under_way(int device);
  // A wait of a stream for longer than this is a violation, and ends.
  static void set_patience(std::chrono::milliseconds longest);
};

namespace emulated {
class Capture;
}

// A graph of work, as a CUDA graph. It begins on the current stream of the current device, and has
// each stream that waits for an event of it. Violations are
//
//   isolation    A stream of the capture waits for an event from outside, or another for one of a
//                capture that has ended; work on a stream of the device that the capture does not
//                have, which no replay would repeat.
//   host         The host waits for the device or asks it, on any thread, as in CUDA's global mode.
//                is_complete() of zero/memory/device_stream.h may ask: there it is relaxed.
//   memory       A replay writes to memory from outside that was freed, or copies host memory that
//                was. Memory of the capture is the graph's. Each replay fills it with NaN where it
//                was allocated and where it was freed.
//   ends         A stream has work, or a wait, that the origin does not wait for. The capture
//   begins
//                on the default stream.
class EmulatedGraph {
 public:
  void capture_begin();
  void capture_end();
  // Behind what the current stream has to do, and before what it is given then.
  void replay();

 private:
  std::shared_ptr<emulated::Capture> capture_;
};

// For kernels and collectives of the emulated device.
namespace emulated {

struct MemoryUse {
  const void* begin = nullptr;
  int64_t bytes = 0;
  bool writes = false;
};

// Appends work to a stream.
void enqueue(c10::Stream stream, std::function<void()> work);
// Enqueues a kernel as CUDA does: on a stream given by its number, of which 0 is the default stream
// of the current device. `memory` is any that it touches. Returns null or an error text.
//   used  bytes that it uses, for the record of calls, besides the first of `memory`, which it
//   writes
const char* launch(void* native_stream, const void* memory, std::function<void()> work,
                   const std::vector<MemoryUse>& used = {});
// What a stream waits for.
class Gate {
 public:
  Gate();
  void open();
  bool is_open() const;
  // Returns when it is open, or when patience ends, which is a violation of `what`.
  void wait(const std::string& what) const;
  // What copies have in common.
  const void* id() const { return state_.get(); }

 private:
  struct State;
  std::shared_ptr<State> state_;
};
c10::Stream current_stream(int device);
// Returns the device that owns this memory; -1 for host memory.
int device_of(const void* memory);
void report(const std::string& violation);
std::chrono::milliseconds patience();
std::chrono::microseconds copy_time();

}  // namespace emulated
}  // namespace zero
