// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how a warp updates elements whose state is not fp32.
//
// A warp takes one block of kStateBlock elements at a time; its thread `lane` has elements lane,
// lane + 32, ... in registers. So neighbours of a warp touch neighbours of memory whatever the
// alignment is, and the largest magnitude of a block needs no shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/cuda_packs.cuh"
#include "kernels/cuda/cuda_tiles.cuh"
#include "kernels/detail/state_codes.h"
#include "kernels/detail/state_noise.h"
#include "kernels/segments.h"

namespace zero::kernels::cuda {

constexpr int kLanes = 32;
constexpr int kPerLane = kStateBlock / kLanes;
static_assert(kSmallestTile % kStateBlock == 0, "a block is in one tile");

// Elements [first, first + count) of a segment: a block, or what the segment has of the last one.
struct StateBlock {
  int64_t first;
  int count;
  int lane;

  __device__ bool has(int j) const { return lane + kLanes * j < count; }
  __device__ int64_t at(int j) const { return first + lane + kLanes * j; }
  __device__ uint32_t noise(uint32_t key, int j) const {
    return noise_of(key, static_cast<uint32_t>(lane + kLanes * j));
  }
};

// Calls f(block) for the blocks of elements [begin, end), with all threads of one warp for each.
template <class F>
__device__ void for_each_state_block(int64_t begin, int64_t end, const F& f) {
  const auto lane = static_cast<int>(threadIdx.x % kLanes);
  for (int64_t first = begin + threadIdx.x / kLanes * kStateBlock; first < end;
       first += kThreads / kLanes * kStateBlock) {
    f(StateBlock{first, static_cast<int>(end - first < kStateBlock ? end - first : kStateBlock),
                 lane});
  }
}

// The values of a block that a thread has; 0 behind the end of the segment.
struct LaneValues {
  float values[kPerLane];
};

__device__ inline LaneValues load_lane(const float* array, const StateBlock& block) {
  LaneValues lane;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    lane.values[j] = block.has(j) ? array[block.at(j)] : 0.0F;
  }
  return lane;
}

__device__ inline void store_lane(float* array, const StateBlock& block, const LaneValues& lane) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (block.has(j)) array[block.at(j)] = lane.values[j];
  }
}

// `working` is not null.
template <class W>
__device__ void narrow_lane(void* working, const StateBlock& block, const LaneValues& lane) {
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (block.has(j)) narrow(lane.values[j], static_cast<W*>(working)[block.at(j)]);
  }
}

__device__ inline void store_working(void* working, ElementType type, const StateBlock& block,
                                     const LaneValues& lane) {
  if (working == nullptr) {
    return;
  }
  if (type == ElementType::kBFloat16) {
    narrow_lane<__nv_bfloat16>(working, block, lane);
  } else if (type == ElementType::kHalf) {
    narrow_lane<__half>(working, block, lane);
  } else {
    narrow_lane<float>(working, block, lane);
  }
}

// The codes of an array of `numel` elements, which follow its scales.
__device__ inline uint8_t* codes_of(void* array, int64_t numel) {
  return reinterpret_cast<uint8_t*>(static_cast<float*>(array) +
                                    (numel + kStateBlock - 1) / kStateBlock);
}

// Averages, or second moments with kRoot, of a block of an array of `numel` elements.
template <StateType kType, bool kRoot>
__device__ LaneValues load_state(void* array, int64_t numel, const StateBlock& block) {
  LaneValues lane;
  if constexpr (kType == StateType::kInt8) {
    const float scale = static_cast<const float*>(array)[block.first / kStateBlock];
    const uint8_t* const codes = codes_of(array, numel);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint8_t code = block.has(j) ? codes[block.at(j)] : uint8_t{0};
      lane.values[j] = decode_code<kRoot>(kRoot ? int32_t{code} : static_cast<int8_t>(code), scale);
    }
  } else {
    const auto* const bits = static_cast<const uint16_t*>(array);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      lane.values[j] = state_float(block.has(j) ? uint32_t{bits[block.at(j)]} << 16 : 0U);
    }
  }
  return lane;
}

// The reverse, rounded by the noise of `key`. All threads of the warp call this; kInt8 takes roots.
template <StateType kType, bool kRoot>
__device__ void store_state(const LaneValues& lane, uint32_t key, void* array, int64_t numel,
                            const StateBlock& block) {
  if constexpr (kType == StateType::kInt8) {
    int32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      // What is behind the end was updated too, from zeros.
      largest = max(largest, block.has(j) ? magnitude_bits(lane.values[j]) : 0);
    }
    const float scale = state_scale<kRoot>(__reduce_max_sync(0xffffffffU, largest));
    const float inverse = inverse_state_scale<kRoot>(scale);
    __syncwarp();  // all lanes have read the scale of before
    if (block.lane == 0) {
      static_cast<float*>(array)[block.first / kStateBlock] = scale;
    }
    uint8_t* const codes = codes_of(array, numel);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t noise = block.noise(key, j);
      const int32_t code =
          inverse > 0.0F ? encode_code<kRoot>(lane.values[j], inverse, own_noise<kRoot>(noise)) : 0;
      if (block.has(j)) codes[block.at(j)] = static_cast<uint8_t>(code);
    }
  } else {
    auto* const bits = static_cast<uint16_t*>(array);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const uint32_t noise = block.noise(key, j);
      const uint16_t code = encode_bfloat16_state(lane.values[j], own_noise<kRoot>(noise));
      if (block.has(j)) bits[block.at(j)] = code;
    }
  }
}

}  // namespace zero::kernels::cuda
