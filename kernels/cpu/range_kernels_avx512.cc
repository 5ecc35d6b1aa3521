// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU loops for -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// g++ 12 warns of its own header, whose functions take a register as it is (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "kernels/cpu/range_kernels_impl.h"
#else
#include "kernels/cpu/range_kernels.h"
#endif

namespace zero::kernels {

const RangeKernels* avx512_range_kernels() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  static constexpr RangeKernels kTable = make_range_kernels("avx512");
  return &kTable;
#elif defined(__x86_64__)
#error "zero: compile this file with the -mavx512 flags above, or slower loops run"
#else
  return nullptr;
#endif
}

}  // namespace zero::kernels
