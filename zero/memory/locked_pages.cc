// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/locked_pages.h"

#ifdef ZERO_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

#include <cstddef>

namespace zero {

#ifdef ZERO_CUDA
namespace {

// A capture of another thread can be of a mode in which these calls fail and end the capture. In
// relaxed mode they do neither.
template <class F>
cudaError_t beside_captures(const F& call) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  const bool changed = cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess;
  const cudaError_t error = call();
  if (error != cudaSuccess) cudaGetLastError();  // else the next check of a kernel would find it
  if (changed) cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

}  // namespace
#endif

bool lock_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes,
                [[maybe_unused]] c10::Device device) noexcept {
#ifdef ZERO_CUDA
  if (device.is_cuda()) {
    return beside_captures([&] {
             return cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterDefault);
           }) == cudaSuccess;
  }
#endif
  return false;
}

bool unlock_pages([[maybe_unused]] void* memory, [[maybe_unused]] c10::Device device) noexcept {
#ifdef ZERO_CUDA
  if (!device.is_cuda()) return true;
  // A thread's current device is the first one until it sets another, and a call makes a context
  // there.
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) before = device.index();
  if (before != device.index()) cudaSetDevice(device.index());
  const cudaError_t error = beside_captures([&] { return cudaHostUnregister(memory); });
  // This makes no context either.
  if (before != device.index()) c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(before));
  return error == cudaSuccess || error == cudaErrorCudartUnloading;
#else
  return true;
#endif
}

}  // namespace zero
