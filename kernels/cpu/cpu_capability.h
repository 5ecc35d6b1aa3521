// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which set of CPU loops is in use. Chosen once, at the first kernel: the best
// that this processor has, or what the environment variable ZERO_CPU_CAPABILITY
// says (default, avx2 or avx512). The results do not depend on it, bit for bit.
#pragma once

#include "kernels/cpu/range_kernels.h"

namespace zero::kernels {

enum class CpuCapability { kDefault, kAvx2, kAvx512 };

// Null when this program or this processor lacks the instruction set.
const RangeKernels* range_kernels_for(CpuCapability capability);

// The loops in use. Throws c10::Error at the first call if ZERO_CPU_CAPABILITY
// names something unknown or something that this processor lacks.
const RangeKernels& range_kernels();

// Replaces the loops in use, for tests and benchmarks. Throws c10::Error where
// range_kernels_for() is null. Not while a kernel runs.
void set_cpu_capability(CpuCapability capability);

}  // namespace zero::kernels
