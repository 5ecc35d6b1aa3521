// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "tests/support/cuda_emulation/cuda_runtime.h"

#include <cstdlib>
#include <utility>
#include <vector>

#include "tests/support/cuda_emulation/cuda_emulation.h"

namespace cuda_emulation {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kMostParameterBytes = 4096;

int processors = 2;
cudaError_t next_error = cudaSuccess;
cudaError_t last_error = cudaSuccess;
cudaError_t broken = cudaSuccess;
std::vector<int64_t> grids;

}  // namespace

void set_processors(int given) { processors = given; }

void fail_next_launch(cudaError_t error) { next_error = error; }

void break_device(cudaError_t error) { broken = error; }

std::vector<int64_t> take_grids() { return std::exchange(grids, {}); }

cudaError_t launch(const cudaLaunchConfig_t& config, size_t parameter_bytes,
                   const std::function<void()>& body) {
  cudaError_t error = std::exchange(next_error, cudaSuccess);
  const unsigned block = config.blockDim.x;
  if (config.gridDim.x == 0 || block == 0 || block > 1024) {
    error = cudaErrorInvalidConfiguration;
  }
  if (parameter_bytes > kMostParameterBytes) {
    fail("the parameters of a kernel take more than 4096 bytes");
  }
  if (broken != cudaSuccess) error = broken;
  if (error != cudaSuccess) {
    return last_error = error;
  }
  grids.push_back(config.gridDim.x);
  run_grid(config.gridDim.x, block, body);
  return cudaSuccess;
}

}  // namespace cuda_emulation

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  const cudaError_t last = std::exchange(cuda_emulation::last_error, cudaSuccess);
  return cuda_emulation::broken != cudaSuccess ? cuda_emulation::broken : last;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = cuda_emulation::processors, cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  using cuda_emulation::kAlignment;
  // Not rounded up, so that AddressSanitizer sees the end.
  if (posix_memalign(memory, kAlignment, bytes) != 0) {
    cuda_emulation::fail("no memory");
  }
  std::memset(*memory, 0xcd, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (cuda_emulation::broken != cudaSuccess) return cuda_emulation::broken;
  return std::memset(to, value, bytes), cudaSuccess;
}
