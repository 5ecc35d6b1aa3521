// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/guarded_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace zero {

at::Tensor guarded_memory(int64_t bytes, int64_t guard) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  const auto in_pages = [page = sysconf(_SC_PAGESIZE)](int64_t size) {
    return (size + page - 1) / page * page;
  };
  const int64_t own = in_pages(bytes), length = own + in_pages(guard);
  rlimit limit{};
  // Under a limit the program needs its address space for other things.
  const bool unlimited = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
  void* const begin = unlimited ? mmap(nullptr, length, PROT_NONE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                                : MAP_FAILED;
  if (begin == MAP_FAILED) return at::empty({bytes}, options);
  const auto unmap = [begin, length](void*) { munmap(begin, length); };
  at::Tensor memory =
      at::from_blob(static_cast<char*>(begin) + own - bytes, {bytes}, unmap, options);
  if (mprotect(begin, own, PROT_READ | PROT_WRITE) != 0) memory = at::empty({bytes}, options);
  return memory;
}

}  // namespace zero
