// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: masters of fp32, and masters in the two halves of split_master.h.
//
// The array that a kernel keeps masters in has elements of type Kept: float, or int16_t for lower
// halves, whose upper ones are the working values.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/cuda_packs.cuh"
#include "kernels/cuda/cuda_states.cuh"
#include "kernels/detail/split_master.h"

namespace zero::kernels::cuda {

template <class Kept>
constexpr bool kIsSplit = std::is_same_v<Kept, int16_t>;

template <bool kSplit>
using KeptIf = std::conditional_t<kSplit, int16_t, float>;

// In place of the type of working values, for a kernel of split masters.
struct Split {};

template <class W>
using KeptOf = KeptIf<std::is_same_v<W, Split>>;

template <class W>
using WorkingOf = std::conditional_t<std::is_same_v<W, Split>, uint16_t, W>;

// The array of the masters of a segment, which is_kept_as<Kept>().
template <class Kept, class Segment>
Kept* kept_master(const Segment& segment) {
  if constexpr (kIsSplit<Kept>) {
    return segment.remainder;
  } else {
    return segment.master;
  }
}

template <class Kept, class Segment>
bool is_kept_as(const Segment& segment) {
  return (segment.remainder != nullptr) == kIsSplit<Kept>;
}

// Masters i, i + 1, ... of a segment.
template <int kCount, class W>
__device__ Pack<float, kCount> load_master(const float* master, const W*, int64_t i) {
  return load<kCount>(master + i);
}

template <int kCount>
__device__ Pack<float, kCount> load_master(const int16_t* lower, const uint16_t* upper, int64_t i) {
  const auto lowers = load<kCount>(lower + i);
  const auto uppers = load<kCount>(upper + i);
  Pack<float, kCount> pack;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    pack.values[e] = join_master(uppers.values[e], lowers.values[e]);
  }
  return pack;
}

// What is kept of a new master, and its working value.
template <class W>
__device__ void divide(float master, float& kept, W& working) {
  kept = master;
  narrow(master, working);
}

__device__ inline void divide(float master, int16_t& kept, uint16_t& working) {
  split_master(master, working, kept);
}

// The same for a block of stored state.
__device__ inline LaneValues load_master(const float* master, const void*,
                                         const StateBlock& block) {
  return load_lane(master, block);
}

__device__ inline LaneValues load_master(const int16_t* lower, const void* working,
                                         const StateBlock& block) {
  const auto* const upper = static_cast<const uint16_t*>(working);
  LaneValues lane;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    lane.values[j] = block.has(j) ? join_master(upper[block.at(j)], lower[block.at(j)]) : 0.0F;
  }
  return lane;
}

__device__ inline void store_master(float* master, void* working, ElementType type,
                                    const StateBlock& block, const LaneValues& lane) {
  store_lane(master, block, lane);
  store_working(working, type, block, lane);
}

__device__ inline void store_master(int16_t* lower, void* working, ElementType,
                                    const StateBlock& block, const LaneValues& lane) {
  auto* const upper = static_cast<uint16_t*>(working);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (block.has(j)) split_master(lane.values[j], upper[block.at(j)], lower[block.at(j)]);
  }
}

}  // namespace zero::kernels::cuda
