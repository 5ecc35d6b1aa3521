// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The CPU loops for whatever every processor of the architecture has.
#include "kernels/cpu/range_kernels_impl.h"

namespace zero::kernels {

const RangeKernels* default_range_kernels() {
  static constexpr RangeKernels kTable = make_range_kernels("default");
  return &kTable;
}

}  // namespace zero::kernels
