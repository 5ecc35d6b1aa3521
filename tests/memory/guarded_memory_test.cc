// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/guarded_memory.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>

namespace zero {
namespace {

constexpr int64_t kGuard = int64_t{1} << 30;

volatile char* end_of(const at::Tensor& memory) {
  return static_cast<char*>(memory.mutable_data_ptr()) + memory.numel();
}

TEST(GuardedMemoryTest, ItsEndCannotBePassed) {
  for (const int64_t bytes : {1, 100, 4096, 10000}) {
    const at::Tensor memory = guarded_memory(bytes, kGuard);
    memory.fill_(7);
    EXPECT_EQ(memory.sum().item<int64_t>(), 7 * bytes);
    EXPECT_DEATH(end_of(memory)[0] = 1, "");
    EXPECT_DEATH(end_of(memory)[kGuard - 1] = 1, "");
  }
}

TEST(GuardedMemoryTest, WhereAddressSpaceIsLimitedItIsPlain) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &limit), 0);
  rlimit some = limit;
  some.rlim_cur = RLIM_INFINITY - 1;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &some), 0);
  const at::Tensor memory = guarded_memory(100, kGuard);
  EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  memory.fill_(7);
  EXPECT_NE(reinterpret_cast<uintptr_t>(end_of(memory)) % sysconf(_SC_PAGESIZE), 0u);
}

// More than the system has.
TEST(GuardedMemoryTest, WhereItIsRefusedItIsPlain) {
  const at::Tensor memory = guarded_memory(100, int64_t{1} << 60);
  memory.fill_(7);
  EXPECT_NE(reinterpret_cast<uintptr_t>(end_of(memory)) % sysconf(_SC_PAGESIZE), 0u);
}

}  // namespace
}  // namespace zero
