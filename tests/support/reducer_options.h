// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "bookkeeping/plan.h"
#include "zero/gradients/gradient_reducer.h"
#include "zero/gradients/wire_format.h"
#include "zero/options.h"

namespace zero {

// Of a reducer whose gradients are sent as `reduce_dtype`, or else in the dtype of their arena.
inline ReducerOptions reducer_options(const Plan& plan,
                                      std::optional<c10::ScalarType> reduce_dtype = std::nullopt,
                                      bool no_sync_fp32 = false) {
  return {make_wire_formats(plan, ZeroOptions().reduce_dtype(reduce_dtype)), no_sync_fp32};
}

}  // namespace zero
