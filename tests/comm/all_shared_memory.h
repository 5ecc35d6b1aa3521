// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// For tests of what happens without shared memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "zero/comm/backends/shared_memory.h"

namespace zero {

// Takes all of this process's shared memory that is free: addresses, which stay untouched, so that
// no memory of the machine is used. The machine's memory is no multiple of a power of two, so sizes
// are halved down to one byte, for which allocate() gives a page of whatever size.
inline std::vector<at::Tensor> all_shared_memory() {
  std::vector<at::Tensor> all;
  const auto memory = SharedMemory::instance();
  for (int64_t bytes = memory->address().bytes; bytes > 0;) {
    at::Tensor block = memory->allocate(bytes);
    if (block.defined()) {
      all.push_back(std::move(block));
    } else {
      bytes /= 2;
    }
  }
  return all;
}

}  // namespace zero
