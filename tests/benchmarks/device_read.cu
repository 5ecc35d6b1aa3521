// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/benchmarks/device_read.h"

#include <cuda_runtime.h>

namespace zero::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 2048;

__global__ void __launch_bounds__(kThreads)
    read_kernel(const float4* values, int64_t count, float* result) {
  float sum = 0.0F;
#pragma unroll 4
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{kThreads} * kBlocks) {
    const float4 x = values[i];
    sum += (x.x + x.y) + (x.z + x.w);
  }
  if (sum == 12345.678F) {  // almost never true, and the compiler does not know
    *result = sum;
  }
}

}  // namespace

const char* device_read(const float* values, int64_t numel, float* result) {
  read_kernel<<<kBlocks, kThreads>>>(reinterpret_cast<const float4*>(values), numel / 4, result);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace zero::kernels
