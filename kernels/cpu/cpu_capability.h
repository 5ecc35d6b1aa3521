// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which set of CPU loops is in use. Chosen once, at the first kernel: the best
// that this processor has, or what the environment variable ZERO_CPU_CAPABILITY
// says (default, avx2 or avx512). The results do not depend on it, bit for bit.
//
// On ARM `default` is NEON, which every such processor has. There are no loops for SVE: what g++ 12
// makes of encode_block_int8 with -march=armv8.2-a+sve is wrong in vectors of more than 128 bits.
#pragma once

#include "kernels/cpu/range_kernels.h"

namespace zero::kernels {

enum class CpuCapability { kDefault, kAvx2, kAvx512 };

inline constexpr CpuCapability kCpuCapabilities[] = {CpuCapability::kDefault, CpuCapability::kAvx2,
                                                     CpuCapability::kAvx512};

// The name in ZERO_CPU_CAPABILITY, also of what this processor lacks.
const char* name_of(CpuCapability capability);

// Null when this program or this processor lacks the instruction set.
const RangeKernels* range_kernels_for(CpuCapability capability);

// The loops in use. Throws c10::Error at the first call if ZERO_CPU_CAPABILITY
// names something unknown or something that this processor lacks.
const RangeKernels& range_kernels();

// Replaces the loops in use, for tests and benchmarks. Throws c10::Error where
// range_kernels_for() is null. Not while a kernel runs.
void set_cpu_capability(CpuCapability capability);

}  // namespace zero::kernels
