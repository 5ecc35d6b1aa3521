// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/cpu/cpu_capability.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <string>

namespace zero::kernels {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

const RangeKernels* best_range_kernels() {
  for (CpuCapability capability : {CpuCapability::kAvx512, CpuCapability::kAvx2}) {
    if (const RangeKernels* kernels = range_kernels_for(capability)) {
      return kernels;
    }
  }
  return default_range_kernels();
}

const RangeKernels* initial_range_kernels() {
  const char* variable = std::getenv("ZERO_CPU_CAPABILITY");
  if (variable == nullptr || *variable == '\0') {
    return best_range_kernels();
  }
  const std::string name = variable;
  for (CpuCapability capability : kCpuCapabilities) {
    const RangeKernels* kernels = range_kernels_for(capability);
    if (kernels != nullptr && name == kernels->name) {
      return kernels;
    }
  }
  TORCH_CHECK(false,
              "ZERO_CPU_CAPABILITY must be default, avx2 or avx512 and be supported by this ",
              "processor, got '", name, "'; the best that is supported is '",
              best_range_kernels()->name, "'. Unset it to use that.");
}

std::atomic<const RangeKernels*>& current() {
  static std::atomic<const RangeKernels*> kernels{initial_range_kernels()};
  return kernels;
}

}  // namespace

const char* name_of(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kDefault:
      return "default";
    case CpuCapability::kAvx2:
      return "avx2";
    case CpuCapability::kAvx512:
      return "avx512";
  }
  return "unknown";
}

const RangeKernels* range_kernels_for(CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kDefault:
      return default_range_kernels();
    case CpuCapability::kAvx2:
      return has_avx2() ? avx2_range_kernels() : nullptr;
    case CpuCapability::kAvx512:
      return has_avx512() ? avx512_range_kernels() : nullptr;
  }
  return nullptr;
}

const RangeKernels& range_kernels() { return *current().load(std::memory_order_relaxed); }

void set_cpu_capability(CpuCapability capability) {
  const RangeKernels* kernels = range_kernels_for(capability);
  TORCH_CHECK(kernels != nullptr, "set_cpu_capability: this processor or program lacks it");
  current().store(kernels, std::memory_order_relaxed);
}

}  // namespace zero::kernels
