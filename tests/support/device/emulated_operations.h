// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What emulated_operations.cc, which has the ATen operations of the emulated device, needs of
// emulated_device.cc. Private to these two.
#pragma once

#include <string>

#include "tests/support/device/emulated_device.h"

namespace zero::emulated {

void count_host_wait(int device);
// The host waits for a stream. In a capture that is a violation, and it does not.
void await(const c10::Stream& stream, const std::string& what);
// For the record of calls: that work of a stream uses memory.
void note_use(const c10::Stream& stream, const MemoryUse& use);
void count_to_host(int device, int64_t bytes);
// A copy to the host for which the host does not wait was enqueued, or made.
void count_under_way(int device, int64_t copies);
// Blocks until the current stream of a device has done what it was given.
void catch_up(int device);
// The memory may be given to something else only after what this stream has to do now.
void record_on_stream(const void* memory, const c10::Stream& stream);

}  // namespace zero::emulated
