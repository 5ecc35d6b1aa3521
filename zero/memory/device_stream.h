// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Returns the Stream on which kernels of this thread run for memory of a device: its own cores for
// the CPU, the current CUDA stream for a GPU. Beside it: what depends on captures in CUDA graphs.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>

#include "kernels/stream.h"

namespace zero {

// `device` must be the current one. Throws c10::Error for a device without kernels, and for a GPU
// in a program that was built without --config=cuda.
kernels::Stream current_stream(c10::Device device);

// current_capture() and is_complete() are weak: tests link others, for a device that captures as
// CUDA does.

// Returns a number of the capture in a CUDA graph that has that stream, or 0 for none.
uint64_t current_capture(c10::Device device);
inline bool is_capturing(c10::Device device) { return current_capture(device) != 0; }

// Returns whether what came before an event, recorded outside of captures, is done. A plain query
// would end a capture that is under way in this thread or another.
bool is_complete(const c10::Event& event);

}  // namespace zero
