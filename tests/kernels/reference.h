// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The definition of every kernel as a plain loop over host memory, one thread and
// one element at a time. The tests compare the fast code with these; read them to
// learn what a kernel does, and never call them where speed matters.
//
// The arguments are those of the functions with the same names one namespace up.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "kernels/adam.h"
#include "kernels/block_int8.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/sgd.h"
#include "kernels/sum_rows.h"

namespace zero::kernels::reference {

void cast_copy(const void* source, c10::ScalarType source_dtype, void* destination,
               c10::ScalarType destination_dtype, int64_t numel, const void* addend);

void sum_rows(const SumRowsArgs& args);

void encode_block_int8(const void* source, c10::ScalarType source_dtype, int64_t rows,
                       int64_t numel, void* destination);

void sum_block_int8(const SumBlockInt8Args& args);

// Added up in long double, so closer to the exact sum than the fast code.
void sum_of_abs_powers(c10::ArrayRef<ConstSpan> spans, double p, double* result);

void max_abs_bits(c10::ArrayRef<ConstSpan> spans, int64_t* result);

void adam_step(c10::ArrayRef<AdamSegment> segments, const AdamOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype);

void sgd_step(c10::ArrayRef<SgdSegment> segments, const SgdOptions& options,
              const float* gradient_coefficient, const double* nonfinite,
              c10::ScalarType working_dtype);

void ema_step(const EmaSegment& segment, float weight);

void lion_step(c10::ArrayRef<LionSegment> segments, const LionOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype);

}  // namespace zero::kernels::reference
