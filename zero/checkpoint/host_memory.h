// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Host memory for files of checkpoints, which are written once from beginning to end.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace zero {

// Returns [bytes] of kByte in host memory that nothing has been written to. A large block has huge
// pages where the system gives them to who asks: with small ones the first write to a page takes
// three times as long as the copy, and delays those of other threads.
//
// For copies from `device`, a GPU, its pages are locked, if the system allows it. That takes time,
// so such memory should be used again.
at::Tensor fresh_memory(int64_t bytes, c10::Device device = at::kCPU);

// Memory for one file after the other: writing to memory that was used before needs no page faults.
class KeptMemory {
 public:
  // As fresh_memory(), or what the last call returned, if that is as large and no longer in use.
  at::Tensor allocate(int64_t bytes, c10::Device device = at::kCPU);

 private:
  at::Tensor memory_;
  c10::Device device_ = at::kCPU;
};

}  // namespace zero
