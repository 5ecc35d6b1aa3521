// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/device_stream.h"

#include <c10/util/Exception.h>

#ifdef ZERO_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace zero {

kernels::Stream current_stream(c10::Device device) {
  if (device.is_cpu()) return {};
  TORCH_CHECK(device.is_cuda(), "expected parameters on cpu or cuda, got ", device);
#ifdef ZERO_CUDA
  return {true, c10::cuda::getCurrentCUDAStream(device.index()).stream()};
#else
  TORCH_CHECK(false, "got parameters on ", device,
              ", but this program was built without CUDA; build it with --config=cuda");
#endif
}

bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef ZERO_CUDA
  return device.is_cuda() &&
         c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

}  // namespace zero
