// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops behind RangeKernels. Included once by each
// range_kernels_<isa>.cc; everything has internal linkage (see range_kernels.h).
//
// The loops are plain and left to the compiler to vectorise. Where a type has to
// be converted they work in chunks that stay in the L1 cache, so that memory is
// still read and written once.
#pragma once

#include "kernels/cpu/range_block_int8.h"
#include "kernels/cpu/range_cast.h"
#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_norm.h"
#include "kernels/cpu/range_split.h"
#include "kernels/cpu/range_state.h"
#include "kernels/cpu/range_sum_rows.h"
#include "kernels/cpu/range_update.h"

namespace zero::kernels {
namespace {

constexpr RangeKernels make_range_kernels(const char* name) {
  return {name,
          cast_copy_range,
          round_to_bfloat16_range,
          sum_rows_range,
          encode_block_int8_range,
          sum_block_int8_range,
          sum_of_squares_range,
          sum_of_abs_range,
          add_squares_exactly_range,
          count_nonfinite_range,
          max_abs_bits_range,
          adam_range,
          sgd_range,
          lion_range,
          ema_range,
          stored_adam_range,
          stored_sgd_range,
          stored_lion_range,
          decode_codes_range,
          encode_codes_range,
          join_halves_range,
          split_halves_range};
}

}  // namespace
}  // namespace zero::kernels
