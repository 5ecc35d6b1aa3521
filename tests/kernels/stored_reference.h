// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The formulas of stored_state.h and of its noise as plain loops over host memory, one element at a
// time, written without the kernels' code for them.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "kernels/adam.h"
#include "kernels/lion.h"
#include "kernels/sgd.h"
#include "kernels/stored_state.h"

namespace zero::kernels::reference {

// The noise of `element` of a parameter.
uint32_t state_noise(int64_t step, int64_t parameter, int64_t element);

// Element `i` of an array of `numel`, in fp32; with `root` a second moment.
float stored_value(StateType type, bool root, const void* stored, int64_t numel, int64_t i);

// Stores all `values`, second moments with `root`, rounded by noise[i]: its lower 16 bits, or with
// `root` its upper ones.
void store_values(StateType type, bool root, const float* values, int64_t numel,
                  const uint32_t* noise, void* stored);

// One step of one segment, whatever its type of state; the arguments are those of the functions
// without `stored` in kernels/.
void stored_adam_step(const AdamSegment& segment, const AdamOptions& options,
                      const float* gradient_coefficient, c10::ScalarType working_dtype);
void stored_sgd_step(const SgdSegment& segment, const SgdOptions& options,
                     const float* gradient_coefficient, c10::ScalarType working_dtype);
void stored_lion_step(const LionSegment& segment, const LionOptions& options,
                      const float* gradient_coefficient, c10::ScalarType working_dtype);

}  // namespace zero::kernels::reference
