// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// lion_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_updates.cuh"
#include "kernels/detail/segment_parts.h"

namespace zero::kernels::cuda {
namespace {

// What a kernel reads of a LionSegment.
template <class Kept, class State>
struct Segment {
  Kept* master;
  State* exp_avg;
  const float* gradient;
  void* working;
  int64_t numel;
};

template <class Kept>
struct StoredSegment : Segment<Kept, void> {
  int64_t parameter;
  int64_t element;
};

__device__ void read_rate(const DeviceRate& rate, LionCoefficients& c) {
  if (rate.lr != nullptr) {
    set_rate(*rate.lr, rate.weight_decay, c);
  }
}

template <class W>
__global__ void __launch_bounds__(kThreads)
    lion_kernel(const __grid_constant__ Tiles<Segment<KeptOf<W>, float>> table, LionCoefficients c,
                const DeviceRate rate, const float* gradient_coefficient, const double* nonfinite) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  read_rate(rate, c);
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const Segment<KeptOf<W>, float>& s, int64_t begin, int64_t end) {
    auto* const working = static_cast<WorkingOf<W>*>(s.working);
    const bool vectors = aligned<kWidth>(s.master) && aligned<kWidth>(s.exp_avg) &&
                         aligned<kWidth>(s.gradient) && aligned<kWidth>(working);
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      auto p = load_master<kCount>(s.master, working, i);
      auto m = load<kCount>(static_cast<const float*>(s.exp_avg + i));
      const auto g = load<kCount>(s.gradient + i);
      Pack<KeptOf<W>, kCount> kept;
      Pack<WorkingOf<W>, kCount> narrowed;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        lion_element(c, g.values[e] * coefficient, p.values[e], m.values[e]);
        divide(p.values[e], kept.values[e], narrowed.values[e]);
      }
      store<kCount>(s.master + i, kept);
      store<kCount>(s.exp_avg + i, m);
      if (working != nullptr) {
        store<kCount>(working + i, narrowed);
      }
    });
  });
}

template <StateType kType, bool kSplit>
__global__ void __launch_bounds__(kThreads)
    stored_lion_kernel(const __grid_constant__ Tiles<StoredSegment<KeptIf<kSplit>>> table,
                       LionCoefficients c, const DeviceRate rate, const NoiseStep step,
                       const float* gradient_coefficient, const double* nonfinite,
                       const ElementType working_type) {
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  read_rate(rate, c);
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const StoredSegment<KeptIf<kSplit>>& s, int64_t begin, int64_t end) {
    const NoiseSeed seed = noise_seed(step, s.parameter);
    for_each_state_block(begin, end, [&](const StateBlock& block) {
      LaneValues p = load_master(s.master, s.working, block);
      const LaneValues g = load_lane(s.gradient, block);
      LaneValues m = load_state<kType, false>(s.exp_avg, s.numel, block);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        lion_element(c, g.values[j] * coefficient, p.values[j], m.values[j]);
      }
      store_master(s.master, s.working, working_type, block, p);
      store_state<kType, false>(m, noise_key(seed, s.element + block.first), s.exp_avg, s.numel,
                                block);
    });
  });
}

}  // namespace

const char* lion_step(const LionSegment* segments, int64_t count,
                      const LionCoefficients& coefficients, const DeviceRate& rate,
                      const float* gradient_coefficient, const double* nonfinite,
                      const NoiseStep& noise, ElementType working_type, void* stream) {
  const auto segment_of = [&]<class Kept, class State>(const LionSegment& s, StateType type) {
    const bool taken = s.state_type == type && is_kept_as<Kept>(s);
    return Segment<Kept, State>{kept_master<Kept>(s), static_cast<State*>(s.exp_avg), s.gradient,
                                written_working(s), taken ? s.numel : 0};
  };
  return launch_update<Segment, StoredSegment>(
      segments, count, working_type, stream, segment_of,
      [&]<class W>(W*, const auto& launch) {
        return launch(lion_kernel<W>, coefficients, rate, gradient_coefficient, nonfinite);
      },
      [&]<StateType kType, bool kSplit>(const auto& launch) {
        return launch(stored_lion_kernel<kType, kSplit>, coefficients, rate, noise,
                      gradient_coefficient, nonfinite, working_type);
      });
}

}  // namespace zero::kernels::cuda
