// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What one rank of a sharded run holds, beside what it would hold alone.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "bookkeeping/memory.h"

namespace zero::examples {

// Returns the bytes of a process alone, which follow from the number of parameters: parameters and
// gradients in `dtype`, and an fp32 master copy unless the parameters are fp32.
//   all_states  bytes of the optimizer's state on all ranks together
MemoryReport unsharded_memory(int64_t parameters, c10::ScalarType dtype, int64_t all_states,
                              bool ema);

// One line a kind, in MB, beside those of unsharded_memory().
std::string memory_table(const MemoryReport& sharded, int64_t parameters, c10::ScalarType dtype,
                         int64_t all_states);

// One line: what a rank would hold with a billion parameters in bf16, beside what it would hold
// alone with AdamW, everything else in fp32.
std::string billion_line(int64_t world_size, const MemoryOptions& options);

}  // namespace zero::examples
