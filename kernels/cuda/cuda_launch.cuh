// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how a kernel is launched, on how many blocks, and the text of its error.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/cuda_kernels.h"

namespace zero::kernels::cuda {

constexpr int kThreads = 256;

inline const char* text_of(cudaError_t error) {
  if (error == cudaErrorNoKernelImageForDevice) {
    return "the kernels are compiled for compute capability 8.0 (A100) and later, and the current "
           "GPU is older";
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Enough blocks to fill the current device.
inline int64_t resident_blocks() {
  int device = 0;
  int processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    processors = 64;
  }
  return std::min<int64_t>(int64_t{processors} * (2048 / kThreads), block_limit.load());
}

// Enqueues kernel(arguments...) on `grid` blocks of kThreads threads. Null, or the text of the
// error, which is also cleared, so that the next call does not report it again.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t grid, void* stream,
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const char* error = text_of(cudaLaunchKernelEx(&config, kernel, arguments...));
  if (error != nullptr) {
    cudaGetLastError();
  }
  return error;
}

}  // namespace zero::kernels::cuda
