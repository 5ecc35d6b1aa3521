// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ema_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"

namespace zero::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    ema_kernel(const __grid_constant__ Tiles<EmaSegment> table, float weight,
               const float* device_weight) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (device_weight != nullptr) {
    weight = *device_weight;
  }
  if (weight == 0.0F) {
    return;
  }
  for_each_tile(table, [&](const EmaSegment& s, int64_t begin, int64_t end) {
    const bool vectors = aligned<kWidth>(s.average) && aligned<kWidth>(s.values);
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      auto average = load<kCount>(static_cast<const float*>(s.average + i));
      const auto values = load<kCount>(s.values + i);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        ema_element(weight, values.values[e], average.values[e]);
      }
      store<kCount>(s.average + i, average);
    });
  });
}

}  // namespace

const char* ema_step(const EmaSegment* segments, int64_t count, float weight,
                     const float* device_weight, void* stream) {
  const auto segment_of = [&](int64_t i) { return segments[i]; };
  return launch_over_tiles<EmaSegment>(count, segment_of, ema_kernel, stream, weight,
                                       device_weight);
}

}  // namespace zero::kernels::cuda
