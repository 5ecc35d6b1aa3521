// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// lion_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/detail/segment_parts.h"

namespace zero::kernels::cuda {
namespace {

// What a kernel reads of a LionSegment.
struct Segment {
  float* master;
  float* exp_avg;
  const float* gradient;
  void* working;
  int64_t numel;
};

template <class W>
__global__ void __launch_bounds__(kThreads)
    lion_kernel(const __grid_constant__ Tiles<Segment> table, LionCoefficients c,
                const DeviceRate rate, const float* gradient_coefficient, const double* nonfinite) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  if (rate.lr != nullptr) {
    set_rate(*rate.lr, rate.weight_decay, c);
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const Segment& s, int64_t begin, int64_t end) {
    W* working = static_cast<W*>(s.working);
    const bool vectors = aligned<kWidth>(s.master) && aligned<kWidth>(s.exp_avg) &&
                         aligned<kWidth>(s.gradient) && aligned<kWidth>(working);
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      auto p = load<kCount>(static_cast<const float*>(s.master + i));
      auto m = load<kCount>(static_cast<const float*>(s.exp_avg + i));
      const auto g = load<kCount>(s.gradient + i);
      Pack<W, kCount> narrowed;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        lion_element(c, g.values[e] * coefficient, p.values[e], m.values[e]);
        narrow(p.values[e], narrowed.values[e]);
      }
      store<kCount>(s.master + i, p);
      store<kCount>(s.exp_avg + i, m);
      if (working != nullptr) {
        store<kCount>(working + i, narrowed);
      }
    });
  });
}

}  // namespace

const char* lion_step(const LionSegment* segments, int64_t count,
                      const LionCoefficients& coefficients, const DeviceRate& rate,
                      const float* gradient_coefficient, const double* nonfinite,
                      ElementType working_type, void* stream) {
  const auto segment_of = [&](int64_t i) {
    const LionSegment& s = segments[i];
    return Segment{s.master, static_cast<float*>(s.exp_avg), s.gradient, written_working(s),
                   s.numel};
  };
  return with_device_type(working_type, [&]<class W>(W*) {
    return launch_over_tiles<Segment>(count, segment_of, lion_kernel<W>, stream, coefficients, rate,
                                      gradient_coefficient, nonfinite);
  });
}

}  // namespace zero::kernels::cuda
