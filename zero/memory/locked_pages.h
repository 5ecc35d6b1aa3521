// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Locks pages of host memory for copies from a GPU: only then does such a copy run at the speed of
// the bus, and while the host goes on. Libtorch's pinned memory has sizes of powers of two.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace zero {

// Returns whether the pages of `memory`, whole ones, are locked: not if `device`, which is the
// current one, is no GPU, or the system refuses, as over a limit. Takes about as long as writing to
// all of the memory, and may wait for the device.
bool lock_pages(void* memory, int64_t bytes, c10::Device device) noexcept;

// Ends that, on any thread, also beside captures of other threads and while the process ends.
// Returns whether the memory may be freed: pages that stay locked must not be mapped anew.
bool unlock_pages(void* memory, c10::Device device) noexcept;

}  // namespace zero
