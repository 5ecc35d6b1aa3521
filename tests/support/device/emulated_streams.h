// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Streams, events and captures of the emulated device. Private to emulated_*.cc.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/device/emulated_device.h"

namespace zero::emulated {

// Streams have the numbers device * kStreams + 1, +2, ...; the default stream of every device is 0,
// as CUDA's is null.
inline constexpr int kStreams = 32;
inline constexpr c10::StreamId kFrees = -1;  // memory that several have used comes back here

class Capture;
using CapturePtr = std::shared_ptr<Capture>;

struct Event {
  Gate gate;
  CapturePtr capture = nullptr;  // in which it was recorded
  size_t number = 0;             // there
};

c10::Stream stream_of(int device, c10::StreamId id);

// Returns a gate that opens when the stream has done what it has to do outside of captures.
Gate mark(const c10::Stream& stream);
// Appends work to a stream, whether a capture has it or not.
void push_outside(const c10::Stream& stream, std::function<void()> work);
bool is_idle(const c10::Stream& stream);
// Of all streams that have had work.
std::vector<Gate> marks();

void record(Event& event, const c10::Stream& stream);
void block(const Event& event, const c10::Stream& stream);

// The capture under way that has this stream, or null.
CapturePtr capture_of(const c10::Stream& stream);
// Work on this stream is a violation where a capture is under way that does not have it.
void check_outside(const c10::Stream& stream);
// Whether the host may wait for this device, or ask whether it is done: for or about `event` if
// that is not null. If not, that is a violation.
bool host_may_wait(int device, const std::string& what, const Event* event = nullptr);
// A capture's own memory: it is not reused before the graph ends.
void keep_memory(Capture& capture, std::function<void()> give_back);
// Work of replays that CUDA does not have.
void add_unseen(Capture& capture, const c10::Stream& stream, std::function<void()> work);

}  // namespace zero::emulated
