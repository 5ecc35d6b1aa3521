// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU loops for -mavx2 -mfma -mf16c.
#if defined(__x86_64__)
#include "kernels/cpu/range_kernels_impl.h"
#else
#include "kernels/cpu/range_kernels.h"
#endif

namespace zero::kernels {

const RangeKernels* avx2_range_kernels() {
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  static constexpr RangeKernels kTable = make_range_kernels("avx2");
  return &kTable;
#elif defined(__x86_64__)
#error "zero: compile this file with the -mavx2 flags above, or slower loops run"
#else
  return nullptr;
#endif
}

}  // namespace zero::kernels
