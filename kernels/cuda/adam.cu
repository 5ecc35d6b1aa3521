// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// adam_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/detail/bias_correction.h"
#include "kernels/detail/segment_parts.h"

namespace zero::kernels::cuda {
namespace {

// What a kernel reads of an AdamSegment, and the two scalars of its step, where the host knows it.
struct Segment {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;
  const float* gradient;
  void* working;
  int64_t numel;
  const float* device_step;
  float sqrt_bias_correction2;
  float negative_step_size;
};

// The scalars of a tile. One thread computes what depends on a step count or a learning rate that
// lives on the device. All threads of the block call this.
__device__ AdamCoefficients coefficients_of(const Segment& segment, AdamCoefficients c,
                                            AdamPowers powers, const DeviceRate& rate) {
  c.sqrt_bias_correction2 = segment.sqrt_bias_correction2;
  c.negative_step_size = segment.negative_step_size;
  if (segment.device_step != nullptr) {
    __shared__ float shared[3];
    __syncthreads();  // the previous tile's values have been read
    if (threadIdx.x == 0) {
      if (rate.lr != nullptr) {
        powers.lr = *rate.lr;
        c.decay = decay_of(powers.lr, rate.weight_decay);
      }
      set_bias_correction(powers, *segment.device_step, c);
      shared[0] = c.sqrt_bias_correction2;
      shared[1] = c.negative_step_size;
      shared[2] = c.decay;
    }
    __syncthreads();
    c.sqrt_bias_correction2 = shared[0];
    c.negative_step_size = shared[1];
    c.decay = shared[2];
  }
  return c;
}

template <class W, bool kAmsgrad, bool kDecoupled>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(const __grid_constant__ Tiles<Segment> table, const AdamCoefficients shared,
                const AdamPowers powers, const DeviceRate rate, const float* gradient_coefficient,
                const double* nonfinite) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const Segment& s, int64_t begin, int64_t end) {
    const AdamCoefficients c = coefficients_of(s, shared, powers, rate);
    W* working = static_cast<W*>(s.working);
    const bool vectors = aligned<kWidth>(s.master) && aligned<kWidth>(s.exp_avg) &&
                         aligned<kWidth>(s.exp_avg_sq) && aligned<kWidth>(s.gradient) &&
                         aligned<kWidth>(working) &&
                         (!kAmsgrad || aligned<kWidth>(s.max_exp_avg_sq));
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      auto p = load<kCount>(static_cast<const float*>(s.master + i));
      auto m = load<kCount>(static_cast<const float*>(s.exp_avg + i));
      auto v = load<kCount>(static_cast<const float*>(s.exp_avg_sq + i));
      const auto g = load<kCount>(s.gradient + i);
      Pack<float, kCount> max_v{};
      if constexpr (kAmsgrad) {
        max_v = load<kCount>(static_cast<const float*>(s.max_exp_avg_sq + i));
      }
      Pack<W, kCount> narrowed;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        adam_element<kAmsgrad, kDecoupled>(c, g.values[e] * coefficient, p.values[e], m.values[e],
                                           v.values[e], max_v.values[e]);
        narrow(p.values[e], narrowed.values[e]);
      }
      store<kCount>(s.master + i, p);
      store<kCount>(s.exp_avg + i, m);
      store<kCount>(s.exp_avg_sq + i, v);
      if constexpr (kAmsgrad) {
        store<kCount>(s.max_exp_avg_sq + i, max_v);
      }
      if (working != nullptr) {
        store<kCount>(working + i, narrowed);
      }
    });
  });
}

}  // namespace

const char* adam_step(const AdamSegment* segments, int64_t count,
                      const AdamCoefficients& coefficients, const AdamPowers& powers,
                      const DeviceRate& rate, const float* gradient_coefficient,
                      const double* nonfinite, ElementType working_type, void* stream) {
  const auto segment_of = [&](int64_t i) {
    const AdamSegment& s = segments[i];
    Segment segment{s.master,
                    static_cast<float*>(s.exp_avg),
                    static_cast<float*>(s.exp_avg_sq),
                    s.max_exp_avg_sq,
                    s.gradient,
                    written_working(s),
                    s.numel,
                    s.device_step,
                    1.0F,
                    0.0F};
    if (s.device_step == nullptr) {
      AdamCoefficients c = coefficients;
      set_bias_correction(powers, static_cast<double>(s.step), c);
      segment.sqrt_bias_correction2 = c.sqrt_bias_correction2;
      segment.negative_step_size = c.negative_step_size;
    }
    return segment;
  };
  return with_device_type(working_type, [&]<class W>(W*) {
    const auto kernel =
        coefficients.amsgrad
            ? (coefficients.decoupled ? adam_kernel<W, true, true> : adam_kernel<W, true, false>)
            : (coefficients.decoupled ? adam_kernel<W, false, true> : adam_kernel<W, false, false>);
    return launch_over_tiles<Segment>(count, segment_of, kernel, stream, coefficients, powers, rate,
                                      gradient_coefficient, nonfinite);
  });
}

}  // namespace zero::kernels::cuda
