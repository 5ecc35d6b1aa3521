// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// adam_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_updates.cuh"
#include "kernels/detail/bias_correction.h"
#include "kernels/detail/segment_parts.h"

namespace zero::kernels::cuda {
namespace {

// What a kernel reads of an AdamSegment, and the two scalars of its step, where the host knows it.
template <class Kept, class State>
struct Segment {
  Kept* master;
  State* exp_avg;
  State* exp_avg_sq;
  float* max_exp_avg_sq;
  const float* gradient;
  void* working;
  int64_t numel;
  const float* device_step;
  float sqrt_bias_correction2;
  float negative_step_size;
};

template <class Kept>
struct StoredSegment : Segment<Kept, void> {
  int64_t parameter;
  int64_t element;
};

// The scalars of a tile. One thread computes what depends on a step count or a learning rate that
// lives on the device. All threads of the block call this.
template <class Kept, class State>
__device__ AdamCoefficients coefficients_of(const Segment<Kept, State>& segment, AdamCoefficients c,
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
    adam_kernel(const __grid_constant__ Tiles<Segment<KeptOf<W>, float>> table,
                const AdamCoefficients shared, const AdamPowers powers, const DeviceRate rate,
                const float* gradient_coefficient, const double* nonfinite) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const Segment<KeptOf<W>, float>& s, int64_t begin, int64_t end) {
    const AdamCoefficients c = coefficients_of(s, shared, powers, rate);
    auto* const working = static_cast<WorkingOf<W>*>(s.working);
    const bool vectors = aligned<kWidth>(s.master) && aligned<kWidth>(s.exp_avg) &&
                         aligned<kWidth>(s.exp_avg_sq) && aligned<kWidth>(s.gradient) &&
                         aligned<kWidth>(working) &&
                         (!kAmsgrad || aligned<kWidth>(s.max_exp_avg_sq));
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      auto p = load_master<kCount>(s.master, working, i);
      auto m = load<kCount>(static_cast<const float*>(s.exp_avg + i));
      auto v = load<kCount>(static_cast<const float*>(s.exp_avg_sq + i));
      const auto g = load<kCount>(s.gradient + i);
      Pack<float, kCount> max_v{};
      if constexpr (kAmsgrad) {
        max_v = load<kCount>(static_cast<const float*>(s.max_exp_avg_sq + i));
      }
      Pack<KeptOf<W>, kCount> kept;
      Pack<WorkingOf<W>, kCount> narrowed;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        adam_element<kAmsgrad, kDecoupled>(c, g.values[e] * coefficient, p.values[e], m.values[e],
                                           v.values[e], max_v.values[e]);
        divide(p.values[e], kept.values[e], narrowed.values[e]);
      }
      store<kCount>(s.master + i, kept);
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

template <StateType kType, bool kAmsgrad, bool kDecoupled, bool kSplit>
__global__ void __launch_bounds__(kThreads, kAmsgrad || kType == StateType::kInt8 ? 2 : 3)
    stored_adam_kernel(const __grid_constant__ Tiles<StoredSegment<KeptIf<kSplit>>> table,
                       const AdamCoefficients shared, const AdamPowers powers,
                       const DeviceRate rate, const NoiseStep step,
                       const float* gradient_coefficient, const double* nonfinite,
                       const ElementType working_type) {
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const StoredSegment<KeptIf<kSplit>>& s, int64_t begin, int64_t end) {
    const AdamCoefficients c = coefficients_of(s, shared, powers, rate);
    const NoiseSeed seed = noise_seed(step, s.parameter);
    for_each_state_block(begin, end, [&](const StateBlock& block) {
      LaneValues p = load_master(s.master, s.working, block);
      const LaneValues g = load_lane(s.gradient, block);
      LaneValues m = load_state<kType, false>(s.exp_avg, s.numel, block);
      LaneValues v = load_state<kType, true>(s.exp_avg_sq, s.numel, block);
      LaneValues max_v{};
      if constexpr (kAmsgrad) {
        max_v = load_lane(s.max_exp_avg_sq, block);
      }
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        adam_element<kAmsgrad, kDecoupled>(c, g.values[j] * coefficient, p.values[j], m.values[j],
                                           v.values[j], max_v.values[j]);
        if constexpr (kType == StateType::kInt8) {
          v.values[j] = square_root(v.values[j]);
        }
      }
      store_master(s.master, s.working, working_type, block, p);
      if constexpr (kAmsgrad) {
        store_lane(s.max_exp_avg_sq, block, max_v);
      }
      const uint32_t key = noise_key(seed, s.element + block.first);
      store_state<kType, false>(m, key, s.exp_avg, s.numel, block);
      store_state<kType, true>(v, key, s.exp_avg_sq, s.numel, block);
    });
  });
}

template <class W>
auto float_kernel_of(const AdamCoefficients& c) {
  return c.amsgrad ? (c.decoupled ? adam_kernel<W, true, true> : adam_kernel<W, true, false>)
                   : (c.decoupled ? adam_kernel<W, false, true> : adam_kernel<W, false, false>);
}

template <StateType kType, bool kSplit>
auto stored_kernel_of(const AdamCoefficients& c) {
  return c.amsgrad ? (c.decoupled ? stored_adam_kernel<kType, true, true, kSplit>
                                  : stored_adam_kernel<kType, true, false, kSplit>)
                   : (c.decoupled ? stored_adam_kernel<kType, false, true, kSplit>
                                  : stored_adam_kernel<kType, false, false, kSplit>);
}

}  // namespace

const char* adam_step(const AdamSegment* segments, int64_t count,
                      const AdamCoefficients& coefficients, const AdamPowers& powers,
                      const DeviceRate& rate, const float* gradient_coefficient,
                      const double* nonfinite, const NoiseStep& noise, ElementType working_type,
                      void* stream) {
  const auto segment_of = [&]<class Kept, class State>(const AdamSegment& s, StateType type) {
    const bool taken = s.state_type == type && is_kept_as<Kept>(s);
    Segment<Kept, State> segment{kept_master<Kept>(s),
                                 static_cast<State*>(s.exp_avg),
                                 static_cast<State*>(s.exp_avg_sq),
                                 s.max_exp_avg_sq,
                                 s.gradient,
                                 written_working(s),
                                 taken ? s.numel : 0,
                                 s.device_step,
                                 1.0F,
                                 0.0F};
    if (taken && s.device_step == nullptr) {
      AdamCoefficients c = coefficients;
      set_bias_correction(powers, static_cast<double>(s.step), c);
      segment.sqrt_bias_correction2 = c.sqrt_bias_correction2;
      segment.negative_step_size = c.negative_step_size;
    }
    return segment;
  };
  return launch_update<Segment, StoredSegment>(
      segments, count, working_type, stream, segment_of,
      [&]<class W>(W*, const auto& launch) {
        return launch(float_kernel_of<W>(coefficients), coefficients, powers, rate,
                      gradient_coefficient, nonfinite);
      },
      [&]<StateType kType, bool kSplit>(const auto& launch) {
        return launch(stored_kernel_of<kType, kSplit>(coefficients), coefficients, powers, rate,
                      noise, gradient_coefficient, nonfinite, working_type);
      });
}

}  // namespace zero::kernels::cuda
