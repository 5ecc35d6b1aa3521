// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/checkpoint/host_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include "zero/memory/locked_pages.h"

namespace zero {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

}  // namespace

at::Tensor fresh_memory(int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  // A locked page must hold nothing else.
  if (bytes == 0 || (bytes < kHugePage && device.is_cpu())) return at::empty({bytes}, options);
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "not enough memory: expected ", bytes,
                   " bytes for a copy");
  madvise(memory, bytes, MADV_HUGEPAGE);  // refused by systems without them
  const bool locked = lock_pages(memory, bytes, device);
  const auto free = [=](void* begin) {
    if (!locked || unlock_pages(begin, device)) munmap(begin, bytes);
  };
  return at::from_blob(memory, {bytes}, free, options);
}

at::Tensor KeptMemory::allocate(int64_t bytes, c10::Device device) {
  const bool fits = memory_.defined() && memory_.numel() == bytes && device_ == device &&
                    memory_.storage().use_count() == 1;
  if (!fits) memory_ = fresh_memory(bytes, device);
  device_ = device;
  // Not the same tensor: the storage counts who uses it.
  return memory_.narrow(0, 0, bytes);
}

}  // namespace zero
