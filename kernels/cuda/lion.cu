// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// lion_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_states.cuh"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/detail/segment_parts.h"

namespace zero::kernels::cuda {
namespace {

// What a kernel reads of a LionSegment.
template <class State>
struct Segment {
  float* master;
  State* exp_avg;
  const float* gradient;
  void* working;
  int64_t numel;
};

struct StoredSegment : Segment<void> {
  int64_t parameter;
  int64_t element;
};

template <class W>
__global__ void __launch_bounds__(kThreads)
    lion_kernel(const __grid_constant__ Tiles<Segment<float>> table, LionCoefficients c,
                const DeviceRate rate, const float* gradient_coefficient, const double* nonfinite) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  if (rate.lr != nullptr) {
    set_rate(*rate.lr, rate.weight_decay, c);
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const Segment<float>& s, int64_t begin, int64_t end) {
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

template <StateType kType>
__global__ void __launch_bounds__(kThreads)
    stored_lion_kernel(const __grid_constant__ Tiles<StoredSegment> table, LionCoefficients c,
                       const DeviceRate rate, const NoiseStep step,
                       const float* gradient_coefficient, const double* nonfinite,
                       const ElementType working_type) {
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  if (rate.lr != nullptr) {
    set_rate(*rate.lr, rate.weight_decay, c);
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const StoredSegment& s, int64_t begin, int64_t end) {
    const uint64_t seed = noise_seed(step, s.parameter);
    for_each_state_block(begin, end, [&](const StateBlock& block) {
      LaneValues p = load_lane(s.master, block);
      const LaneValues g = load_lane(s.gradient, block);
      LaneValues m = load_state<kType, false>(s.exp_avg, s.numel, block);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        lion_element(c, g.values[j] * coefficient, p.values[j], m.values[j]);
      }
      store_lane(s.master, block, p);
      store_working(s.working, working_type, block, p);
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
  const auto segment_of = [&]<class State>(int64_t i, StateType type, State*) {
    const LionSegment& s = segments[i];
    return Segment<State>{s.master, static_cast<State*>(s.exp_avg), s.gradient, written_working(s),
                          s.state_type == type ? s.numel : 0};
  };
  const char* const error = with_device_type(working_type, [&]<class W>(W*) {
    return launch_over_tiles<Segment<float>>(
        count,
        [&](int64_t i) { return segment_of(i, StateType::kFloat, static_cast<float*>(nullptr)); },
        lion_kernel<W>, stream, coefficients, rate, gradient_coefficient, nonfinite);
  });
  if (error != nullptr) {
    return error;
  }
  return launch_for_state_types(segments, count, [&](StateType type) {
    return launch_over_tiles<StoredSegment>(
        count,
        [&](int64_t i) {
          return StoredSegment{segment_of(i, type, static_cast<void*>(nullptr)),
                               segments[i].parameter, segments[i].element};
        },
        type == StateType::kInt8 ? stored_lion_kernel<StateType::kInt8>
                                 : stored_lion_kernel<StateType::kBFloat16>,
        stream, coefficients, rate, noise, gradient_coefficient, nonfinite, working_type);
  });
}

}  // namespace zero::kernels::cuda
