// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Streams of a device that has them, such as a GPU, in libtorch's words.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace zero {

// Returns whether copies of this device's memory run on a stream, while the host goes on.
inline bool has_streams(c10::Device device) {
  return device.is_cuda() || device.is_privateuseone();
}

// Returns the current stream of this thread.
c10::Stream current_torch_stream(c10::Device device);

// Returns a stream of libtorch's pool, of high priority: communication that waits behind the
// kernels of the backward pass would overlap nothing.
c10::Stream new_stream(c10::Device device);

// Makes `later` wait for what `earlier`, a stream of the same device, has to do by now. The host
// does not wait.
void make_wait(const c10::Stream& later, const c10::Stream& earlier);

}  // namespace zero
