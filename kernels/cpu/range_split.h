// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of split_master.h. Included once by range_kernels_impl.h, for each
// instruction set.
#pragma once

#include <cstdint>

#include "kernels/detail/split_master.h"

namespace zero::kernels {
namespace {

void join_halves_range(const uint16_t* __restrict upper, const int16_t* __restrict lower,
                       int64_t numel, float* __restrict master) {
  for (int64_t i = 0; i < numel; ++i) {
    master[i] = join_master(upper[i], lower[i]);
  }
}

void split_halves_range(const float* __restrict master, int64_t numel, uint16_t* __restrict upper,
                        int16_t* __restrict lower) {
  for (int64_t i = 0; i < numel; ++i) {
    uint16_t upper_i = 0;
    int16_t lower_i = 0;
    split_master(master[i], upper_i, lower_i);
    upper[i] = upper_i;
    lower[i] = lower_i;
  }
}

}  // namespace
}  // namespace zero::kernels
