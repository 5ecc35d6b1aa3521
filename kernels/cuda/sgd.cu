// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// sgd_step for CUDA memory. Compile with -fmad=false (see update_rules.h).
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_updates.cuh"
#include "kernels/detail/segment_parts.h"

namespace zero::kernels::cuda {
namespace {

// What a kernel reads of an SgdSegment.
template <class Kept, class State>
struct Segment {
  Kept* master;
  State* momentum;
  const float* gradient;
  void* working;
  int64_t numel;
  const float* device_step;
  bool first_step;
};

template <class Kept>
struct StoredSegment : Segment<Kept, void> {
  int64_t parameter;
  int64_t element;
};

template <class Kept, class State>
__device__ bool is_first_step(const Segment<Kept, State>& s) {
  return s.device_step != nullptr ? *s.device_step == 1.0F : s.first_step;
}

__device__ void read_rate(const double* device_lr, SgdCoefficients& c) {
  if (device_lr != nullptr) {
    c.negative_lr = static_cast<float>(-*device_lr);
  }
}

// One pack of elements; kFirst: the momentum is assigned and not read.
template <bool kMomentum, bool kFirst, int kCount, class W>
__device__ void update(const Segment<KeptOf<W>, float>& s, const SgdCoefficients& c,
                       float coefficient, int64_t i, WorkingOf<W>* working) {
  auto p = load_master<kCount>(s.master, working, i);
  const auto g = load<kCount>(s.gradient + i);
  Pack<float, kCount> b{};
  if constexpr (kMomentum && !kFirst) {
    b = load<kCount>(static_cast<const float*>(s.momentum + i));
  }
  Pack<KeptOf<W>, kCount> kept;
  Pack<WorkingOf<W>, kCount> narrowed;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    sgd_element<kMomentum, kFirst>(c, g.values[e] * coefficient, p.values[e], b.values[e]);
    divide(p.values[e], kept.values[e], narrowed.values[e]);
  }
  store<kCount>(s.master + i, kept);
  if constexpr (kMomentum) {
    store<kCount>(s.momentum + i, b);
  }
  if (working != nullptr) {
    store<kCount>(working + i, narrowed);
  }
}

template <class W, bool kMomentum>
__global__ void __launch_bounds__(kThreads)
    sgd_kernel(const __grid_constant__ Tiles<Segment<KeptOf<W>, float>> table, SgdCoefficients c,
               const double* device_lr, const float* gradient_coefficient,
               const double* nonfinite) {
  constexpr int kWidth = 4;  // 16 bytes of fp32
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  read_rate(device_lr, c);
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const Segment<KeptOf<W>, float>& s, int64_t begin, int64_t end) {
    auto* const working = static_cast<WorkingOf<W>*>(s.working);
    const bool first = is_first_step(s);
    const bool vectors = aligned<kWidth>(s.master) && aligned<kWidth>(s.gradient) &&
                         aligned<kWidth>(working) && (!kMomentum || aligned<kWidth>(s.momentum));
    for_each_pack<kWidth>(begin, end, vectors, [&](auto width, int64_t i) {
      constexpr int kCount = decltype(width)::value;
      if (first) {
        update<kMomentum, true, kCount, W>(s, c, coefficient, i, working);
      } else {
        update<kMomentum, false, kCount, W>(s, c, coefficient, i, working);
      }
    });
  });
}

// Its momentum is not 0.
template <StateType kType, bool kSplit>
__global__ void __launch_bounds__(kThreads, 2)
    stored_sgd_kernel(const __grid_constant__ Tiles<StoredSegment<KeptIf<kSplit>>> table,
                      SgdCoefficients c, const double* device_lr, const NoiseStep step,
                      const float* gradient_coefficient, const double* nonfinite,
                      const ElementType working_type) {
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  read_rate(device_lr, c);
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  for_each_tile(table, [&](const StoredSegment<KeptIf<kSplit>>& s, int64_t begin, int64_t end) {
    const bool first = is_first_step(s);
    const NoiseSeed seed = noise_seed(step, s.parameter);
    for_each_state_block(begin, end, [&](const StateBlock& block) {
      LaneValues p = load_master(s.master, s.working, block);
      const LaneValues g = load_lane(s.gradient, block);
      LaneValues b{};
      if (!first) {
        b = load_state<kType, false>(s.momentum, s.numel, block);
      }
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        if (first) {
          sgd_element<true, true>(c, g.values[j] * coefficient, p.values[j], b.values[j]);
        } else {
          sgd_element<true, false>(c, g.values[j] * coefficient, p.values[j], b.values[j]);
        }
      }
      store_master(s.master, s.working, working_type, block, p);
      store_state<kType, false>(b, noise_key(seed, s.element + block.first), s.momentum, s.numel,
                                block);
    });
  });
}

}  // namespace

const char* sgd_step(const SgdSegment* segments, int64_t count, const SgdCoefficients& coefficients,
                     const double* device_lr, const float* gradient_coefficient,
                     const double* nonfinite, const NoiseStep& noise, ElementType working_type,
                     void* stream) {
  // Without momentum no state is touched, and its type does not matter.
  const bool momentum = coefficients.momentum != 0.0F;
  const auto segment_of = [&]<class Kept, class State>(const SgdSegment& s, StateType type) {
    const bool taken = (s.state_type == type || !momentum) && is_kept_as<Kept>(s);
    return Segment<Kept, State>{kept_master<Kept>(s), static_cast<State*>(s.momentum),
                                s.gradient,           written_working(s),
                                taken ? s.numel : 0,  s.device_step,
                                s.first_step};
  };
  return launch_update<Segment, StoredSegment>(
      segments, count, working_type, stream, segment_of,
      [&]<class W>(W*, const auto& launch) {
        return launch(momentum ? sgd_kernel<W, true> : sgd_kernel<W, false>, coefficients,
                      device_lr, gradient_coefficient, nonfinite);
      },
      [&]<StateType kType, bool kSplit>(const auto& launch) -> const char* {
        if (!momentum) return nullptr;
        return launch(stored_sgd_kernel<kType, kSplit>, coefficients, device_lr, noise,
                      gradient_coefficient, nonfinite, working_type);
      });
}

}  // namespace zero::kernels::cuda
