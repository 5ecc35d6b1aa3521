// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how the threads of a block touch memory, and conversions of one element.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// One store of 16 or 8 bytes. nvcc splits an assignment into one store for each element where it
// stands beside a conversion to bf16 or in a branch.
__device__ inline void store_whole(uint4* to, uint4 x) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
#else
  *to = x;
#endif
}

__device__ inline void store_whole(uint2* to, uint2 x) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
#else
  *to = x;
#endif
}

template <int kWidth, class T>
__device__ void store(T* pointer, const Pack<T, kWidth>& pack) {
  if constexpr (kWidth == 1) {
    *pointer = pack.values[0];
  } else {
    using Word = std::conditional_t<sizeof(pack) % 16 == 0, uint4, uint2>;
    static_assert(sizeof(pack) % sizeof(Word) == 0);
    constexpr int kWords = sizeof(pack) / sizeof(Word);
    Word words[kWords];
    memcpy(words, &pack, sizeof(pack));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      store_whole(reinterpret_cast<Word*>(pointer) + i, words[i]);
    }
  }
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
