// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how a CUDA launch covers many segments, and how a thread touches memory.
//
// The segments of a call travel by value in the kernel's parameters, kCapacity
// at a time: no copy to the device, nothing to keep alive. Each is cut into tiles
// of kTile elements; a block takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... and
// finds the segment of a tile by bisection. Tiles begin at multiples of kTile, so a
// tile is aligned where its segment is, and whether a block may use 16-byte
// accesses is one uniform branch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cpu/range_kernels.h"

namespace zero::kernels::cuda {

constexpr int kThreads = 256;
constexpr int64_t kTile = 8192;

inline const char* text_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Of the launch just made. Also clears the error, so that the next call does not report it again.
inline const char* launch_error() { return text_of(cudaGetLastError()); }

// Enough blocks to fill the current device, and no more than there is work for.
inline int grid_for(int64_t work) {
  int device = 0;
  int processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    processors = 64;
  }
  const int64_t most = int64_t{processors} * (2048 / kThreads);
  return static_cast<int>(work < most ? work : most);
}

// Kernel parameters may take 4096 bytes; the other arguments need less than 256.
template <class Segment>
struct Tiles {
  static constexpr int kCapacity =
      (4096 - 256) / static_cast<int>(sizeof(Segment) + sizeof(int32_t));
  Segment segments[kCapacity];
  int32_t first_tile[kCapacity + 1];  // of each segment, then the number of tiles
  int32_t count;
};

static_assert(sizeof(Tiles<CopySpan>) <= 4096 - 128 && sizeof(Tiles<AdamSegment>) <= 4096 - 128);

// Fills tables from segment_of(0 .. count - 1), leaving out empty segments, and
// calls launch(table, grid) for each full one and the last. Stops at an error.
template <class Segment, class SegmentOf, class Launch>
const char* for_each_table(int64_t count, const SegmentOf& segment_of, const Launch& launch) {
  Tiles<Segment> table;
  table.count = 0;
  table.first_tile[0] = 0;
  const auto flush = [&]() -> const char* {
    const int32_t tiles = table.first_tile[table.count];
    if (tiles == 0) {
      return nullptr;
    }
    launch(table, grid_for(tiles));
    table.count = 0;
    return launch_error();
  };
  for (int64_t i = 0; i < count; ++i) {
    const Segment segment = segment_of(i);
    if (segment.numel == 0) {
      continue;
    }
    if (table.count == Tiles<Segment>::kCapacity) {
      if (const char* error = flush()) {
        return error;
      }
    }
    table.segments[table.count] = segment;
    table.first_tile[table.count + 1] =
        table.first_tile[table.count] + static_cast<int32_t>((segment.numel + kTile - 1) / kTile);
    ++table.count;
  }
  return flush();
}

// Calls f(segment, begin, end) for every tile of this block; all its threads
// make the same calls.
template <class Segment, class F>
__device__ void for_each_tile(const Tiles<Segment>& table, const F& f) {
  const int32_t tiles = table.first_tile[table.count];
  for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    int32_t low = 0;
    int32_t high = table.count;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (table.first_tile[middle] <= tile ? low : high) = middle;
    }
    const Segment& segment = table.segments[low];
    const int64_t begin = int64_t{tile - table.first_tile[low]} * kTile;
    const int64_t end = begin + kTile < segment.numel ? begin + kTile : segment.numel;
    f(segment, begin, end);
  }
}

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

// Calls f with a null pointer of the device type for `type`.
template <class F>
void with_device_type(ElementType type, const F& f) {
  switch (type) {
    case ElementType::kFloat:
      return f(static_cast<float*>(nullptr));
    case ElementType::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case ElementType::kHalf:
      return f(static_cast<__half*>(nullptr));
  }
}

}  // namespace zero::kernels::cuda
