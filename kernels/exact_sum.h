// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums of squares whose bits depend neither on the order of additions nor on how values are cut
// into spans at multiples of kExactBlock elements.
//
// The squares of a block are added up in double in a fixed order. The sum of a block is a multiple
// of 2^-298 of at most 2^264, and is added without rounding to a fixed-point number:
//
//   value = sum over i of limbs[i] * 2^(32 i - 298)     limbs 0 to kExactLimbs - 1
//
// Integer additions have no order. Source: Kulisch, "Computer Arithmetic and Validity", 2008, the
// long accumulator, with limbs that keep carries apart as in Neal, "Fast exact summation using
// small and large superaccumulators", 2015.
//
// The bits are the same for every number of threads, on every instruction set of a CPU and on every
// CUDA device: both add up element i of a block in sum i % 32, and these 32 sums in halves.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// Adds the squares of all spans to `sum`, [kExactNumel] int64 of the stream's memory, which the
// caller sets to 0 first; calls add up. A block with a value that is not finite adds nothing to the
// limbs, and how many such values it has to the counts behind them. Afterwards each limb but the
// last is in [0, 2^32), so that the limbs of up to 2^21 ranks add up exactly in double too. The
// spans may overlap; those of one call have at most 2^30 blocks, or 1 TiB.
void add_squares_exactly(c10::ArrayRef<ConstSpan> spans, int64_t* sum, Stream stream);

// *value = the sum rounded to double once, to nearest even: NaN where a value is NaN, else infinity
// where one is infinite. `sum` stays; its limbs may be any numbers from 0 to 2^53. The bits are the
// same for all limbs that stand for one number. `value` is memory of the stream.
void value_of_exact_sum(const int64_t* sum, double* value, Stream stream);

}  // namespace zero::kernels
