// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Computes the parts of a gradient norm. Each function reads its input once and
// combines what it finds into `result`, so that calls for several lists of
// spans add up; the caller sets `result` to zero first.
//
// `result` is host memory for the CPU and device memory for CUDA. The spans may
// overlap. Spans with numel 0 are legal, and so is an empty list.
//
// `workspace` is [kNormWorkspace] double of device memory, overwritten by the work that the call
// enqueues; calls on one stream may share it. It is unused on the CPU and may be null there.
//
// The order in which the values are added up depends on the spans alone: on the
// CPU the bits are the same for every thread count and instruction set, and on
// CUDA for every run and every number of processors. Between the two, and between
// different ways of cutting the same values into spans, results agree to about
// 1e-15 relative, the rounding of additions in double.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// result[0] += sum of x^2;  result[1] += how many x are infinite or NaN.
//   result  [2] double
// The square of a float is exact in double and cannot overflow there, so every
// finite input has a finite sum. A value that is not finite makes the sum
// infinite or NaN as well as being counted.
void sum_of_squares(c10::ArrayRef<ConstSpan> spans, double* result, double* workspace,
                    Stream stream);

// result[0] += sum of |x|^p, p > 0;  result[1] as above. p = 1 and p = 2 run at
// the speed of memory; other powers call pow() in double, and may overflow to
// infinity there for finite x, which is not counted.
void sum_of_abs_powers(c10::ArrayRef<ConstSpan> spans, double p, double* result, double* workspace,
                       Stream stream);

// *result = max(*result, bits of |x|) over all x, as integers: for numbers this
// is the order of |x|, infinity is above them and NaN above infinity, so the
// maximum loses nothing. Exact. 0x7f800000 is infinity, greater is NaN, and
// the low 32 bits of *result reinterpreted as fp32 are the maximum.
void max_abs_bits(c10::ArrayRef<ConstSpan> spans, int64_t* result, Stream stream);

}  // namespace zero::kernels
