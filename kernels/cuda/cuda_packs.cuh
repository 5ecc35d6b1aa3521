// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how the threads of a block touch memory, and conversions of one element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace zero::kernels::cuda {

// kWidth neighbours that move with accesses of up to 16 bytes.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Pack {
  T values[kWidth];
};

template <int kWidth, class T>
__device__ bool aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T, kWidth>) == 0;
}

template <int kWidth, class T>
__device__ Pack<T, kWidth> load(const T* pointer) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(pointer);
}

template <int kWidth, class T>
__device__ void store(T* pointer, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(pointer) = pack;
}

// Calls f(integral constant width, i) until [begin, end) is covered by the threads
// of the block: width kWidth where `vectors` allows it and 1 for the rest.
template <int kWidth>
struct Width {
  static constexpr int value = kWidth;
};

template <int kWidth, class F>
__device__ void for_each_pack(int64_t begin, int64_t end, bool vectors, const F& f) {
  int64_t scalars = begin;
  if (vectors) {
    scalars = begin + (end - begin) / kWidth * kWidth;
    for (int64_t i = begin + int64_t{threadIdx.x} * kWidth; i < scalars;
         i += int64_t{blockDim.x} * kWidth) {
      f(Width<kWidth>{}, i);
    }
  }
  for (int64_t i = scalars + threadIdx.x; i < end; i += blockDim.x) {
    f(Width<1>{}, i);
  }
}

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }
__device__ inline void narrow(float x, __half& to) { to = __float2half_rn(x); }

}  // namespace zero::kernels::cuda
