// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/device_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#ifdef ZERO_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace zero {

kernels::Stream current_stream(c10::Device device) {
  if (device.is_cpu()) return {};
  const c10::impl::VirtualGuardImpl backend(device.type());
  // A kernel is launched on the current device, whatever device its memory and its stream are of.
  TORCH_INTERNAL_ASSERT(backend.getDevice() == device, "a kernel for memory on ", device,
                        " was asked for while ", backend.getDevice(), " is the current device");
#ifdef ZERO_CUDA
  if (device.is_cuda()) return {true, c10::cuda::getCurrentCUDAStream(device.index()).stream()};
#endif
  TORCH_CHECK(!device.is_cuda(), "got parameters on ", device,
              ", but this program was built without CUDA; build it with --config=cuda (Bazel) or "
              "-DZERO_CUDA=ON (CMake)");
  TORCH_CHECK(device.is_privateuseone(), "expected parameters on cpu or cuda, got ", device);
  // Kernels for a device of another backend are linked in the place of those for CUDA, and know
  // streams by their numbers.
  return {true, reinterpret_cast<void*>(static_cast<intptr_t>(backend.getStream(device).id()))};
}

[[gnu::weak]] uint64_t current_capture([[maybe_unused]] c10::Device device) {
#ifdef ZERO_CUDA
  if (device.is_cuda()) {
    cudaStreamCaptureStatus status{};
    unsigned long long capture = 0;
    C10_CUDA_CHECK(cudaStreamGetCaptureInfo(c10::cuda::getCurrentCUDAStream(device.index()),
                                            &status, &capture));
    return status == cudaStreamCaptureStatusNone ? 0 : capture + 1;
  }
#endif
  return 0;
}

[[gnu::weak]] bool is_complete(const c10::Event& event) {
#ifdef ZERO_CUDA
  if (event.device_type() == c10::DeviceType::CUDA) {
    const c10::cuda::CUDAStreamCaptureModeGuard beside_captures(cudaStreamCaptureModeRelaxed);
    return event.query();
  }
#endif
  return event.query();
}

}  // namespace zero
