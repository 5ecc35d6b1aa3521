// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// sum_rows for CUDA memory.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"

namespace zero::kernels::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const __grid_constant__ SumRowsRange range, int32_t tile) {
  constexpr int kWidth = 8;  // 16 bytes of a 16-bit type
  const T* received = static_cast<const T*>(range.received);
  const T* own = static_cast<const T*>(range.own);
  float* shard = range.shard;
  // Every row must begin at an aligned address, not only the first.
  const bool vectors = aligned<kWidth>(received) && aligned<kWidth>(own) &&
                       aligned<kWidth>(shard) && range.row_stride % kWidth == 0;
  for (int64_t begin = int64_t{blockIdx.x} * tile; begin < range.numel;
       begin += int64_t{gridDim.x} * tile) {
    const int64_t end = begin + tile < range.numel ? begin + tile : range.numel;
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      Pack<float, kCount> sum{};
      for (int64_t r = 0; r < range.world_size; ++r) {
        const T* row = r == range.own_rank ? own : received + r * range.row_stride;
        const Pack<T, kCount> added = load<kCount>(row + i);
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          const float value = widen(added.values[e]);
          sum.values[e] = r == 0 ? value : sum.values[e] + value;
        }
      }
      Pack<float, kCount> result;
      if (range.accumulate) {
        result = load<kCount>(static_cast<const float*>(shard + i));
      }
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const float product = range.factor * sum.values[e];
        result.values[e] = range.accumulate ? result.values[e] + product : product;
      }
      store<kCount>(shard + i, result);
    });
  }
}

}  // namespace

const char* sum_rows(const SumRowsRange& range, void* stream) {
  const int64_t blocks = resident_blocks();
  const int32_t tile = tile_size(range.numel, blocks);
  const int64_t tiles = (range.numel + tile - 1) / tile;
  return with_device_type(range.type, [&]<class T>(T*) {
    return launch(sum_rows_kernel<T>, std::min(tiles, blocks), stream, range, tile);
  });
}

}  // namespace zero::kernels::cuda
