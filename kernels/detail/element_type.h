// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: from libtorch's dtype to the three types that kernels know.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include "kernels/cpu/range_kernels.h"

namespace zero::kernels {

// Throws c10::Error, naming `function` and `argument`, for any other dtype.
inline ElementType element_type(c10::ScalarType dtype, const char* function, const char* argument) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return ElementType::kFloat;
    case c10::ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case c10::ScalarType::Half:
      return ElementType::kHalf;
    default:
      TORCH_CHECK(false, "zero::kernels::", function, ": ", argument,
                  " must be Float, BFloat16 or Half, got ", dtype);
  }
}

inline int64_t element_size(ElementType type) { return type == ElementType::kFloat ? 4 : 2; }

}  // namespace zero::kernels
