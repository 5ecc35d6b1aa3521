// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Enough of CUDA C++ to compile kernels/cuda/*.cu for the host.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

#include "tests/support/cuda_emulation/block_scheduler.h"
#include "tests/support/cuda_emulation/cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

using std::max;
using std::min;

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

// Any memory can be read and written as one of these.
struct alignas(8) [[gnu::may_alias]] uint2 {
  unsigned x, y;
};

struct alignas(16) [[gnu::may_alias]] uint4 {
  unsigned x, y, z, w;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

namespace cuda_emulation {

// An index that depends on which thread reads it. Only x is emulated.
struct Index {
  struct {
    operator unsigned() const { return get(); }
    unsigned (*get)();
  } x;
};

cudaError_t launch(const cudaLaunchConfig_t& config, size_t parameter_bytes,
                   const std::function<void()>& body);

// Parameters lie one after the other, each at a multiple of its alignment.
template <class... Parameters>
constexpr size_t parameter_bytes() {
  size_t bytes = 0;
  ((bytes = (bytes + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters) +
            sizeof(Parameters)),
   ...);
  return bytes;
}

}  // namespace cuda_emulation

inline constexpr cuda_emulation::Index threadIdx{{&cuda_emulation::thread_index}};
inline constexpr cuda_emulation::Index blockIdx{{&cuda_emulation::block_index}};
inline constexpr cuda_emulation::Index blockDim{{&cuda_emulation::block_size}};
inline constexpr cuda_emulation::Index gridDim{{&cuda_emulation::grid_size}};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  // Copied at the launch, as CUDA does.
  const std::tuple<std::decay_t<Parameters>...> copies(arguments...);
  return cuda_emulation::launch(*config, cuda_emulation::parameter_bytes<Parameters...>(),
                                [&] { std::apply(kernel, copies); });
}

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  cuda_emulation::wait_for_block(file, line);
}

inline void __syncwarp() { cuda_emulation::wait_for_warp(); }

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  uint64_t values[32];
  cuda_emulation::exchange_in_warp(mask, bits, values);
  const unsigned lane = cuda_emulation::thread_index() % 32;
  std::memcpy(&value, &values[lane + distance < 32 ? lane + distance : lane], sizeof(T));
  return value;
}

inline int __reduce_max_sync(unsigned mask, int value) {
  uint64_t values[32];
  cuda_emulation::exchange_in_warp(mask, static_cast<uint32_t>(value), values);
  for (const uint64_t other : values) {
    value = std::max(value, static_cast<int>(static_cast<uint32_t>(other)));
  }
  return value;
}

inline long long atomicMax(long long* address, long long value) {
  long long old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {
  }
  return old;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
