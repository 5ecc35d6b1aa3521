// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/locked_pages.h"

#ifdef ZERO_CUDA
#include <cuda_runtime_api.h>
#endif

#include <cstddef>

namespace zero {

bool lock_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes,
                [[maybe_unused]] c10::Device device) noexcept {
#ifdef ZERO_CUDA
  if (device.is_cuda()) {
    const cudaError_t error =
        cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterDefault);
    if (error == cudaSuccess) return true;
    cudaGetLastError();  // else the next check of a kernel would find it
  }
#endif
  return false;
}

void unlock_pages([[maybe_unused]] void* memory, [[maybe_unused]] c10::Device device) noexcept {
#ifdef ZERO_CUDA
  if (!device.is_cuda()) return;
  // A thread's current device is the first one until it sets another, and a call makes a context
  // there. Errors are those of a driver that has ended: with it the pages are unlocked.
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) before = device.index();
  if (before != device.index()) cudaSetDevice(device.index());
  if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();
  if (before != device.index()) cudaSetDevice(before);
#endif
}

}  // namespace zero
