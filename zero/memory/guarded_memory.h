// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Memory that ends where nothing may be read or written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

// Returns [bytes] of kByte with unspecified contents. Behind the last one lie at least `guard`
// bytes of address space in which an access ends the process by a signal. Where address space is
// limited (ulimit -v) or refused, it is plain memory.
at::Tensor guarded_memory(int64_t bytes, int64_t guard);

}  // namespace zero
