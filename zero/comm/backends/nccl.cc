// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/comm/backends/nccl.h"

#include <c10/util/Exception.h>

#ifdef USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace zero {

#ifdef USE_C10D_NCCL

int cuda_device_count() { return c10::cuda::device_count(); }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int world_size, c10::Device device,
                                                    std::chrono::milliseconds timeout) {
  TORCH_CHECK(device.is_cuda() && device.has_index(),
              "NCCL: expected a GPU with its number, such as cuda:0, got ", device, " on rank ",
              rank, " of ", world_size);
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = timeout;
  auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size, std::move(options));
  backend->setBoundDeviceId(device);
  backend->eagerConnectSingleDevice(device);
  return backend;
}

#else

int cuda_device_count() { return 0; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>&,
                                                    int rank, int world_size, c10::Device device,
                                                    std::chrono::milliseconds) {
  TORCH_CHECK(false, "NCCL: this program was built without it, so rank ", rank, " of ", world_size,
              " cannot use ", device, ": build with --config=cuda, or keep the model on the CPU");
}

#endif

}  // namespace zero
