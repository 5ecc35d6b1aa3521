// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// cast_copy and fill_zero for CUDA memory.
#include <type_traits>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"

namespace zero::kernels::cuda {
namespace {

template <class S, class D, bool kWithAddend>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(const __grid_constant__ Tiles<CopySpan> table) {
  // One store of 16 bytes. Where a thread stores 32 bytes, each of its two stores leaves gaps
  // between those of its neighbours, which takes a quarter longer.
  constexpr int kWidth = 16 / sizeof(D);
  for_each_tile(table, [](const CopySpan& span, int64_t begin, int64_t end) {
    const S* source = static_cast<const S*>(span.source);
    D* destination = static_cast<D*>(span.destination);
    const D* addend = static_cast<const D*>(span.addend);
    const bool vectors = aligned<kWidth>(source) && aligned<kWidth>(destination) &&
                         (!kWithAddend || aligned<kWidth>(addend));
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      const Pack<S, kCount> from = load<kCount>(source + i);
      Pack<D, kCount> to;
      if constexpr (kWithAddend) {
        to = load<kCount>(addend + i);
      }
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if constexpr (kWithAddend) {
          narrow(widen(to.values[e]) + widen(from.values[e]), to.values[e]);
        } else if constexpr (std::is_same_v<S, D>) {
          to.values[e] = from.values[e];
        } else {
          narrow(widen(from.values[e]), to.values[e]);
        }
      }
      store<kCount>(destination + i, to);
    });
  });
}

}  // namespace

const char* cast_copy_spans(const CopySpan* spans, int64_t count, ElementType source_type,
                            ElementType destination_type, bool with_addend, void* stream) {
  const auto span_of = [&](int64_t i) { return spans[i]; };
  return with_device_type(source_type, [&]<class S>(S*) {
    return with_device_type(destination_type, [&]<class D>(D*) {
      const auto kernel = with_addend ? cast_kernel<S, D, true> : cast_kernel<S, D, false>;
      return launch_over_tiles<CopySpan>(count, span_of, kernel, stream);
    });
  });
}

const char* fill_zero(void* destination, int64_t bytes, void* stream) {
  return text_of(cudaMemsetAsync(destination, 0, static_cast<size_t>(bytes),
                                 static_cast<cudaStream_t>(stream)));
}

}  // namespace zero::kernels::cuda
