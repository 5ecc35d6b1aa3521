// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Reads device memory and does next to nothing with it: how fast a norm could be.
#pragma once

#include <cstdint>

namespace zero::kernels {

// Enqueues on the legacy default stream. `values` is [numel] fp32 on the device, 16-byte aligned;
// `result` is [1] on the device and holds nothing of use. Null, or the text of the CUDA error.
const char* device_read(const float* values, int64_t numel, float* result);

}  // namespace zero::kernels
