// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the halves of split_master.h, one element at a time, written once for the CPU loops and
// for the CUDA kernels.
#pragma once

#include <cstdint>

#include "kernels/detail/state_codes.h"
#include "kernels/detail/update_rules.h"

namespace zero::kernels {

ZERO_KERNELS_INLINE float join_master(uint16_t upper, int16_t lower) {
  return state_float((uint32_t{upper} << 16) + static_cast<uint32_t>(int32_t{lower}));
}

// Selects without branches, and signed comparisons, which SSE2 and AVX2 have.
ZERO_KERNELS_INLINE void split_master(float master, uint16_t& upper, int16_t& lower) {
  const uint32_t bits = state_bits(master);
  const bool nan = magnitude_bits(master) > 0x7f800000;
  upper = static_cast<uint16_t>((nan ? bits | 0x00400000U : bits + 0x8000U) >> 16);
  lower = static_cast<int16_t>(nan ? 0U : bits);
}

}  // namespace zero::kernels
