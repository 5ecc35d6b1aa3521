// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// add_squares_exactly and value_of_exact_sum for CUDA memory.
//
// A warp takes one block of kExactBlock elements at a time; its thread `lane` adds up the squares
// of elements lane, lane + 32, ..., and the 32 sums are added up in halves. That is the order of
// range_norm.h, and gives the bits of the CPU. Each warp has limbs of its own in shared memory;
// atomics add those of all warps to the caller's, for integer additions have no order.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/detail/exact_sum.h"

namespace zero::kernels::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = kThreads / kLanes;
constexpr int kPerLane = static_cast<int>(kExactBlock) / kLanes;
static_assert(kSmallestTile % kExactBlock == 0, "a block is in one tile");

// The sum over the warp, in lane 0.
template <class T>
__device__ T sum_over_warp(T mine) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    mine += __shfl_down_sync(0xffffffffU, mine, distance);
  }
  return mine;
}

// Adds a block of `count` elements, with all threads of a warp. Lane 0 writes the limbs.
__device__ void add_block(const float* block, int count, int64_t* limbs) {
  const auto lane = static_cast<int>(threadIdx.x % kLanes);
  float values[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    values[j] = lane + kLanes * j < count ? block[lane + kLanes * j] : 0.0F;
  }
  double sum = 0.0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const double x = values[j];
    sum += x * x;
  }
  const bool finite = __reduce_max_sync(0xffffffffU, is_finite_sum(sum) ? 0 : 1) == 0;
  if (finite) {
    sum = sum_over_warp(sum);
    if (lane == 0) add_exactly(sum, limbs);
    return;
  }
  int infinite = 0;
  int nan = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int32_t bits = __float_as_int(values[j]) & 0x7fffffff;
    infinite += bits == 0x7f800000 ? 1 : 0;
    nan += bits > 0x7f800000 ? 1 : 0;
  }
  infinite = sum_over_warp(infinite);
  nan = sum_over_warp(nan);
  if (lane == 0) {
    limbs[kExactLimbs] += infinite;
    limbs[kExactLimbs + 1] += nan;
  }
}

__global__ void __launch_bounds__(kThreads)
    add_squares_kernel(const __grid_constant__ Tiles<ConstSpan> table, int64_t* sum) {
  __shared__ int64_t of_warp[kWarps][kExactNumel];
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  if (threadIdx.x % kLanes == 0) {
    for (int64_t& limb : of_warp[warp]) limb = 0;
  }
  for_each_tile(table, [&](const ConstSpan& span, int64_t begin, int64_t end) {
    for (int64_t first = begin + warp * kExactBlock; first < end; first += kWarps * kExactBlock) {
      const int64_t count = end - first < kExactBlock ? end - first : kExactBlock;
      add_block(span.data + first, static_cast<int>(count), of_warp[warp]);
    }
  });
  __syncthreads();
  if (threadIdx.x < kExactNumel) {
    int64_t mine = 0;
    for (const auto& limbs : of_warp) mine += limbs[threadIdx.x];
    if (mine != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(sum) + threadIdx.x,
                static_cast<unsigned long long>(mine));
    }
  }
}

__global__ void __launch_bounds__(kThreads) carry_kernel(int64_t* sum) {
  if (threadIdx.x == 0) carry_limbs(sum);
}

__global__ void __launch_bounds__(kThreads) value_kernel(const int64_t* sum, double* value) {
  if (threadIdx.x == 0) *value = rounded_sum(sum);
}

}  // namespace

const char* add_squares_exactly(const ConstSpan* spans, int64_t count, int64_t* sum, void* stream) {
  const int64_t blocks = resident_blocks();
  return for_each_table<ConstSpan>(
      count, blocks, [&](int64_t i) { return spans[i]; },
      [&](const Tiles<ConstSpan>& table, int32_t tiles) {
        const char* error =
            launch(add_squares_kernel, std::min<int64_t>(tiles, blocks), stream, table, sum);
        return error != nullptr ? error : launch(carry_kernel, 1, stream, sum);
      });
}

const char* value_of_exact_sum(const int64_t* sum, double* value, void* stream) {
  return launch(value_kernel, 1, stream, sum, value);
}

}  // namespace zero::kernels::cuda
