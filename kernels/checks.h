// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: checks that the public functions of this folder share. `function` is the name of one.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

namespace zero::kernels {

// Throws c10::Error unless there are 0 elements or more, and an address of each array that has any.
template <class... Arrays>
void check_arrays(const char* function, int64_t numel, const Arrays*... arrays) {
  TORCH_CHECK(numel >= 0, "zero::kernels::", function, ": numel must be >= 0, got ", numel);
  TORCH_CHECK(numel == 0 || (... && (arrays != nullptr)), "zero::kernels::", function,
              ": null pointer for ", numel, " elements");
}

// Throws c10::Error for the error of a function of cuda/cuda_kernels.h.
inline void check_launch(const char* function, const char* error) {
  TORCH_CHECK(error == nullptr, "zero::kernels::", function, ": CUDA error: ", error);
}

}  // namespace zero::kernels
