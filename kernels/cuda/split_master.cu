// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// join_halves and split_halves for CUDA memory.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/detail/split_master.h"

namespace zero::kernels::cuda {
namespace {

// What kernels read or write; a span of them is cut into tiles.
template <class Master, class Upper, class Lower>
struct Halves {
  Master* master;
  Upper* upper;
  Lower* lower;
  int64_t numel;
};
using Joined = Halves<float, const uint16_t, const int16_t>;
using Split = Halves<const float, uint16_t, int16_t>;

constexpr int kWidth = 4;  // 16 bytes of fp32

template <class Span>
__device__ bool aligned_halves(const Span& span) {
  return aligned<kWidth>(span.master) && aligned<kWidth>(span.upper) && aligned<kWidth>(span.lower);
}

__global__ void __launch_bounds__(kThreads)
    join_halves_kernel(const __grid_constant__ Tiles<Joined> table) {
  for_each_tile(table, [](const Joined& span, int64_t begin, int64_t end) {
    for_each_pack<kWidth>(begin, end, aligned_halves(span), [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      const auto upper = load<kCount>(span.upper + i);
      const auto lower = load<kCount>(span.lower + i);
      Pack<float, kCount> master;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        master.values[e] = join_master(upper.values[e], lower.values[e]);
      }
      store<kCount>(span.master + i, master);
    });
  });
}

__global__ void __launch_bounds__(kThreads)
    split_halves_kernel(const __grid_constant__ Tiles<Split> table) {
  for_each_tile(table, [](const Split& span, int64_t begin, int64_t end) {
    for_each_pack<kWidth>(begin, end, aligned_halves(span), [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      const auto master = load<kCount>(span.master + i);
      Pack<uint16_t, kCount> upper;
      Pack<int16_t, kCount> lower;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        split_master(master.values[e], upper.values[e], lower.values[e]);
      }
      store<kCount>(span.upper + i, upper);
      store<kCount>(span.lower + i, lower);
    });
  });
}

}  // namespace

const char* join_halves(const uint16_t* upper, const int16_t* lower, int64_t numel, float* master,
                        void* stream) {
  return launch_over_tiles<Joined>(
      1,
      [&](int64_t) {
        return Joined{master, upper, lower, numel};
      },
      join_halves_kernel, stream);
}

const char* split_halves(const float* master, int64_t numel, uint16_t* upper, int16_t* lower,
                         void* stream) {
  return launch_over_tiles<Split>(
      1,
      [&](int64_t) {
        return Split{master, upper, lower, numel};
      },
      split_halves_kernel, stream);
}

}  // namespace zero::kernels::cuda
