// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: what the arguments of a function that reads spans must hold.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include "kernels/segments.h"

namespace zero::kernels {

// Throws c10::Error, naming `function`, for a null result and for elements at a null pointer.
inline void check_spans(c10::ArrayRef<ConstSpan> spans, const void* result, const char* function) {
  TORCH_CHECK(result != nullptr, "zero::kernels::", function, ": result is null");
  for (const ConstSpan& span : spans) {
    TORCH_CHECK(span.numel >= 0, "zero::kernels::", function, ": numel must be >= 0, got ",
                span.numel);
    TORCH_CHECK(span.numel == 0 || span.data != nullptr, "zero::kernels::", function,
                ": null pointer for ", span.numel, " elements");
  }
}

}  // namespace zero::kernels
