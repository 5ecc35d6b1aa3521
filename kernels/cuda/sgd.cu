// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// sgd_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/detail/segment_parts.h"

namespace zero::kernels::cuda {
namespace {

// What a kernel reads of an SgdSegment.
struct Segment {
  float* master;
  float* momentum;
  const float* gradient;
  void* working;
  int64_t numel;
  const float* device_step;
  bool first_step;
};

// One pack of elements; kFirst: the momentum is assigned and not read.
template <bool kMomentum, bool kFirst, int kCount, class W>
__device__ void update(const Segment& s, const SgdCoefficients& c, float coefficient, int64_t i,
                       W* working) {
  auto p = load<kCount>(static_cast<const float*>(s.master + i));
  const auto g = load<kCount>(s.gradient + i);
  Pack<float, kCount> b{};
  if constexpr (kMomentum && !kFirst) {
    b = load<kCount>(static_cast<const float*>(s.momentum + i));
  }
  Pack<W, kCount> narrowed;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    sgd_element<kMomentum, kFirst>(c, g.values[e] * coefficient, p.values[e], b.values[e]);
    narrow(p.values[e], narrowed.values[e]);
  }
  store<kCount>(s.master + i, p);
  if constexpr (kMomentum) {
    store<kCount>(s.momentum + i, b);
  }
  if (working != nullptr) {
    store<kCount>(working + i, narrowed);
  }
}

template <class W, bool kMomentum>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(const __grid_constant__ Tiles<Segment> table, SgdCoefficients c,
               const double* device_lr, const float* gradient_coefficient,
               const double* nonfinite) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  if (device_lr != nullptr) {
    c.negative_lr = static_cast<float>(-*device_lr);
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const Segment& s, int64_t begin, int64_t end) {
    W* working = static_cast<W*>(s.working);
    const bool first = s.device_step != nullptr ? *s.device_step == 1.0F : s.first_step;
    const bool vectors = aligned<kWidth>(s.master) && aligned<kWidth>(s.gradient) &&
                         aligned<kWidth>(working) && (!kMomentum || aligned<kWidth>(s.momentum));
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      if (first) {
        update<kMomentum, true, kCount>(s, c, coefficient, i, working);
      } else {
        update<kMomentum, false, kCount>(s, c, coefficient, i, working);
      }
    });
  });
}

}  // namespace

const char* sgd_step(const SgdSegment* segments, int64_t count, const SgdCoefficients& coefficients,
                     const double* device_lr, const float* gradient_coefficient,
                     const double* nonfinite, ElementType working_type, void* stream) {
  const auto segment_of = [&](int64_t i) {
    const SgdSegment& s = segments[i];
    return Segment{s.master,    static_cast<float*>(s.momentum),
                   s.gradient,  written_working(s),
                   s.numel,     s.device_step,
                   s.first_step};
  };
  return with_device_type(working_type, [&]<class W>(W*) {
    const auto kernel = coefficients.momentum != 0.0F ? sgd_kernel<W, true> : sgd_kernel<W, false>;
    return launch_over_tiles<Segment>(count, segment_of, kernel, stream, coefficients, device_lr,
                                      gradient_coefficient, nonfinite);
  });
}

}  // namespace zero::kernels::cuda
