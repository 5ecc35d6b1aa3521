// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: how a CUDA launch covers many segments.
//
// The segments of a call are passed by value in the kernel's parameters, kCapacity at a time: no
// copy to the device, nothing to keep alive. Each is cut into tiles of one size; a block takes
// tiles blockIdx.x, blockIdx.x + gridDim.x, ... and finds the segment of a tile by bisection.
// Tiles begin at multiples of their size, so a tile is aligned where its segment is, and whether
// a block may use 16-byte accesses is one uniform branch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cpu/range_kernels.h"
#include "kernels/cuda/cuda_launch.cuh"
#include "kernels/cuda/cuda_packs.cuh"

namespace zero::kernels::cuda {

constexpr int32_t kSmallestTile = kThreads * 4;  // elements: 16 bytes of fp32 for each thread
constexpr int32_t kLargestTile = 8192;

// The largest tile that makes `wanted` tiles of these elements: a small shard is spread over many
// blocks, and a large one is not cut finer than it has to be.
inline int32_t tile_size(int64_t elements, int64_t wanted) {
  int32_t tile = kLargestTile;
  while (tile > kSmallestTile && elements < wanted * tile) {
    tile /= 2;
  }
  return tile;
}

// Kernel parameters may take 4096 bytes; the other arguments need less than 256.
template <class Segment>
struct Tiles {
  static constexpr int kCapacity =
      (4096 - 256) / static_cast<int>(sizeof(Segment) + sizeof(int32_t));
  Segment segments[kCapacity];
  int32_t first_tile[kCapacity + 1];  // of each segment, then the number of tiles
  int32_t count;
  int32_t tile;  // elements
};

static_assert(sizeof(Tiles<CopySpan>) <= 4096 - 128);

// Cuts the segments of a table into at least `wanted` tiles where they are long enough. Returns the
// number of tiles.
template <class Segment>
int32_t cut(Tiles<Segment>& table, int64_t wanted) {
  int64_t elements = 0;
  for (int32_t i = 0; i < table.count; ++i) {
    elements += table.segments[i].numel;
  }
  table.tile = tile_size(elements, wanted);
  table.first_tile[0] = 0;
  for (int32_t i = 0; i < table.count; ++i) {
    table.first_tile[i + 1] =
        table.first_tile[i] +
        static_cast<int32_t>((table.segments[i].numel + table.tile - 1) / table.tile);
  }
  return table.first_tile[table.count];
}

// Fills tables from segment_of(0 .. count - 1), leaving out empty segments, and calls
// launch(table, tiles) for each full one and the last. Stops at an error, which it returns.
template <class Segment, class SegmentOf, class Launch>
const char* for_each_table(int64_t count, int64_t wanted_tiles, const SegmentOf& segment_of,
                           const Launch& launch) {
  Tiles<Segment> table;
  table.count = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Segment segment = segment_of(i);
    if (segment.numel == 0) {
      continue;
    }
    if (table.count == Tiles<Segment>::kCapacity) {
      const int32_t tiles = cut(table, wanted_tiles);
      if (const char* error = launch(table, tiles)) {
        return error;
      }
      table.count = 0;
    }
    table.segments[table.count] = segment;
    ++table.count;
  }
  if (table.count == 0) {
    return nullptr;
  }
  const int32_t tiles = cut(table, wanted_tiles);
  return launch(table, tiles);
}

// Runs kernel(table, arguments...) for all segments, on as many blocks as the device holds or as
// there are tiles.
template <class Segment, class SegmentOf, class Kernel, class... Arguments>
const char* launch_over_tiles(int64_t count, const SegmentOf& segment_of, Kernel kernel,
                              void* stream, const Arguments&... arguments) {
  const int64_t blocks = resident_blocks();
  return for_each_table<Segment>(
      count, blocks, segment_of, [&](const Tiles<Segment>& table, int32_t tiles) {
        return launch(kernel, std::min<int64_t>(tiles, blocks), stream, table, arguments...);
      });
}

// Calls f(segment, begin, end) for the tiles first, first + step, ...; all threads of the block
// make the same calls.
template <class Segment, class F>
__device__ void for_each_tile(const Tiles<Segment>& table, int32_t first, int32_t step,
                              const F& f) {
  const int32_t tiles = table.first_tile[table.count];
  for (int32_t tile = first; tile < tiles; tile += step) {
    int32_t low = 0;
    int32_t high = table.count;
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (table.first_tile[middle] <= tile ? low : high) = middle;
    }
    const Segment& segment = table.segments[low];
    const int64_t begin = int64_t{tile - table.first_tile[low]} * table.tile;
    const int64_t end = begin + table.tile < segment.numel ? begin + table.tile : segment.numel;
    f(segment, begin, end);
  }
}

// The same for the tiles of this block, where each tile is done once by the grid.
template <class Segment, class F>
__device__ void for_each_tile(const Tiles<Segment>& table, const F& f) {
  for_each_tile(table, blockIdx.x, gridDim.x, f);
}

// Calls f with a null pointer of the device type for `type`, and returns what f returns.
template <class F>
const char* with_device_type(ElementType type, const F& f) {
  switch (type) {
    case ElementType::kFloat:
      return f(static_cast<float*>(nullptr));
    case ElementType::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case ElementType::kHalf:
      break;
  }
  return f(static_cast<__half*>(nullptr));
}

}  // namespace zero::kernels::cuda
