// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums of powers and the largest magnitude for CUDA memory.
//
// Sums take two kernels. The first adds up tiles 0, slots, 2 * slots, ... in slot 0 of the caller's
// workspace, tiles 1, slots + 1, ... in slot 1 and so on, and the second adds up the slots. The
// order of additions depends on the spans alone, not on the number of blocks that a device holds.
// There are no atomics on doubles, whose order, and so whose last bits, change from run to run.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"

namespace zero::kernels::cuda {
namespace {

struct Partial {
  double sum;
  double nonfinite;
};

// Enough for every device to have work. Long spans have more.
constexpr int64_t kWantedTiles = 1024;

// The sum over the block, in thread 0, in an order that does not change.
__device__ Partial sum_over_block(Partial mine) {
  __shared__ Partial of_warp[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.sum += __shfl_down_sync(0xffffffffU, mine.sum, distance);
    mine.nonfinite += __shfl_down_sync(0xffffffffU, mine.nonfinite, distance);
  }
  __syncthreads();  // the values of the previous call have been read
  if (threadIdx.x % 32 == 0) {
    of_warp[threadIdx.x / 32] = mine;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kThreads / 32; ++warp) {
      mine.sum += of_warp[warp].sum;
      mine.nonfinite += of_warp[warp].nonfinite;
    }
  }
  return mine;
}

__device__ int32_t abs_bits(float x) { return __float_as_int(x) & 0x7fffffff; }

enum class Power { kAbs, kSquare, kAny };

template <Power kPower>
__device__ double power_of(float x, double p) {
  const double magnitude = fabs(static_cast<double>(x));
  if constexpr (kPower == Power::kSquare) {
    return magnitude * magnitude;
  } else if constexpr (kPower == Power::kAbs) {
    return magnitude;
  } else {
    return pow(magnitude, p);
  }
}

template <Power kPower>
__global__ void __launch_bounds__(kThreads)
    partial_sums_kernel(const __grid_constant__ Tiles<ConstSpan> table, double p, int32_t slots,
                        Partial* partials) {
  constexpr int kWidth = 4;
  for (int32_t slot = blockIdx.x; slot < slots; slot += gridDim.x) {
    Partial mine{0.0, 0.0};
    int32_t nonfinite = 0;
    for_each_tile(table, slot, slots, [&](const ConstSpan& span, int64_t begin, int64_t end) {
      for_each_pack<kWidth>(begin, end, aligned<kWidth>(span.data), [&](auto width, int64_t i) {
        constexpr int kCount = decltype(width)::value;
        const Pack<float, kCount> x = load<kCount>(span.data + i);
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          mine.sum += power_of<kPower>(x.values[e], p);
          nonfinite += abs_bits(x.values[e]) >= 0x7f800000 ? 1 : 0;
        }
      });
    });
    mine.nonfinite = nonfinite;
    mine = sum_over_block(mine);
    if (threadIdx.x == 0) {
      partials[slot] = mine;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(const Partial* partials, int32_t slots, double* result) {
  Partial mine{0.0, 0.0};
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    mine.sum += partials[i].sum;
    mine.nonfinite += partials[i].nonfinite;
  }
  mine = sum_over_block(mine);
  if (threadIdx.x == 0) {
    result[0] += mine.sum;
    result[1] += mine.nonfinite;
  }
}

__global__ void __launch_bounds__(kThreads)
    max_abs_bits_kernel(const __grid_constant__ Tiles<ConstSpan> table, long long* result) {
  constexpr int kWidth = 4;
  int32_t largest = 0;
  for_each_tile(table, [&](const ConstSpan& span, int64_t begin, int64_t end) {
    for_each_pack<kWidth>(begin, end, aligned<kWidth>(span.data), [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      const Pack<float, kCount> x = load<kCount>(span.data + i);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        largest = max(largest, abs_bits(x.values[e]));
      }
    });
  });
  largest = __reduce_max_sync(0xffffffffU, largest);
  if (threadIdx.x % 32 == 0) {
    atomicMax(result, static_cast<long long>(largest));  // a maximum has no order
  }
}

}  // namespace

const char* sum_of_abs_powers(const ConstSpan* spans, int64_t count, double p, double* result,
                              double* workspace, int64_t workspace_numel, void* stream) {
  auto* partials = reinterpret_cast<Partial*>(workspace);
  const auto most = static_cast<int32_t>(workspace_numel * sizeof(double) / sizeof(Partial));
  const auto kernel = p == 2.0   ? partial_sums_kernel<Power::kSquare>
                      : p == 1.0 ? partial_sums_kernel<Power::kAbs>
                                 : partial_sums_kernel<Power::kAny>;
  const int64_t blocks = resident_blocks();
  return for_each_table<ConstSpan>(
      count, kWantedTiles, [&](int64_t i) { return spans[i]; },
      [&](const Tiles<ConstSpan>& table, int32_t tiles) {
        const int32_t slots = std::min(tiles, most);
        const char* error =
            launch(kernel, std::min<int64_t>(slots, blocks), stream, table, p, slots, partials);
        return error != nullptr ? error
                                : launch(add_partials_kernel, 1, stream, partials, slots, result);
      });
}

const char* max_abs_bits(const ConstSpan* spans, int64_t count, int64_t* result, void* stream) {
  static_assert(sizeof(long long) == sizeof(int64_t));
  return launch_over_tiles<ConstSpan>(
      count, [&](int64_t i) { return spans[i]; }, max_abs_bits_kernel, stream,
      reinterpret_cast<long long*>(result));
}

}  // namespace zero::kernels::cuda
