// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU loops for -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#include "kernels/cpu/range_kernels_impl.h"

namespace zero::kernels {

const RangeKernels* avx512_range_kernels() {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
  static constexpr RangeKernels kTable = make_range_kernels("avx512");
  return &kTable;
#else
  return nullptr;
#endif
}

}  // namespace zero::kernels
