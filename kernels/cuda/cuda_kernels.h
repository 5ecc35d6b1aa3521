// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: what the .cu files offer. They are compiled with the CUDA toolkit
// alone, so nothing here mentions torch; no_cuda.cc has the same functions for
// programs built without CUDA.
//
// The arguments are those of the public functions, checked by them. `stream` is a
// cudaStream_t. Every function enqueues, never waits, and returns null or the
// text of the CUDA error.
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels/cpu/range_kernels.h"
#include "kernels/detail/state_noise.h"
#include "kernels/detail/update_rules.h"
#include "kernels/segments.h"

namespace zero::kernels::cuda {

// The most blocks that a launch may have. Tests lower it, so that a block takes several tiles on a
// large device too. Results do not depend on it.
inline std::atomic<int64_t> block_limit{int64_t{1} << 30};

const char* cast_copy_spans(const CopySpan* spans, int64_t count, ElementType source_type,
                            ElementType destination_type, bool with_addend, void* stream);

const char* fill_zero(void* destination, int64_t bytes, void* stream);

const char* join_halves(const uint16_t* upper, const int16_t* lower, int64_t numel, float* master,
                        void* stream);

const char* split_halves(const float* master, int64_t numel, uint16_t* upper, int16_t* lower,
                         void* stream);

const char* sum_rows(const SumRowsRange& range, void* stream);

// p = 2 is the sum of squares. `workspace` is [workspace_numel], at least 2; the order of additions
// depends on it.
const char* sum_of_abs_powers(const ConstSpan* spans, int64_t count, double p, double* result,
                              double* workspace, int64_t workspace_numel, void* stream);

const char* max_abs_bits(const ConstSpan* spans, int64_t count, int64_t* result, void* stream);

const char* add_squares_exactly(const ConstSpan* spans, int64_t count, int64_t* sum, void* stream);

const char* value_of_exact_sum(const int64_t* sum, double* value, void* stream);

// The fields of `coefficients` that depend on the step are set for each segment.
const char* adam_step(const AdamSegment* segments, int64_t count,
                      const AdamCoefficients& coefficients, const AdamPowers& powers,
                      const DeviceRate& rate, const float* gradient_coefficient,
                      const double* nonfinite, const NoiseStep& noise, ElementType working_type,
                      void* stream);

const char* sgd_step(const SgdSegment* segments, int64_t count, const SgdCoefficients& coefficients,
                     const double* device_lr, const float* gradient_coefficient,
                     const double* nonfinite, const NoiseStep& noise, ElementType working_type,
                     void* stream);

const char* lion_step(const LionSegment* segments, int64_t count,
                      const LionCoefficients& coefficients, const DeviceRate& rate,
                      const float* gradient_coefficient, const double* nonfinite,
                      const NoiseStep& noise, ElementType working_type, void* stream);

const char* ema_step(const EmaSegment* segments, int64_t count, float weight,
                     const float* device_weight, void* stream);

}  // namespace zero::kernels::cuda
