// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/block_int8.h"

#include <c10/util/Exception.h>

#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/detail/element_type.h"

namespace zero::kernels {
namespace {

static_assert(BlockMap::kBlock % kInt8Block == 0, "threads share no block");

int64_t scales_of(int64_t numel) { return (numel + kInt8Block - 1) / kInt8Block; }

void check_host(Stream stream, const char* function) {
  TORCH_CHECK(!stream.cuda, "zero::kernels::", function,
              ": expected host memory, got a CUDA stream: block int8 has no device code; send "
              "gradients of a GPU in a dtype, with reduce_dtype(torch::kBFloat16) for example");
}

}  // namespace

int64_t block_int8_bytes(int64_t numel) {
  return static_cast<int64_t>(sizeof(float)) * scales_of(numel) + (numel + 3) / 4 * 4;
}

void encode_block_int8(const void* source, c10::ScalarType source_dtype, int64_t rows,
                       int64_t numel, void* destination, Stream stream) {
  check_host(stream, "encode_block_int8");
  const ElementType type = element_type(source_dtype, "encode_block_int8", "source_dtype");
  TORCH_CHECK(rows >= 0 && numel >= 0,
              "zero::kernels::encode_block_int8: rows and numel must be >= 0, got ", rows, " and ",
              numel);
  TORCH_CHECK(rows * numel == 0 || (source != nullptr && destination != nullptr),
              "zero::kernels::encode_block_int8: null pointer for ", rows * numel, " values");
  const RangeKernels& kernels = range_kernels();
  const int64_t bytes = block_int8_bytes(numel);
  const BlockMap map(rows, [&](int64_t) { return numel; });
  map.parallel_for_each_run([&](int64_t row, int64_t begin, int64_t end, int64_t) {
    char* const to = static_cast<char*>(destination) + row * bytes;
    auto* const values = reinterpret_cast<int8_t*>(to) + 4 * scales_of(numel);
    kernels.encode_block_int8(
        static_cast<const char*>(source) + (row * numel + begin) * element_size(type), type,
        end - begin, reinterpret_cast<float*>(to) + begin / kInt8Block, values + begin);
    for (int64_t i = numel; end == numel && i < (numel + 3) / 4 * 4; ++i) values[i] = 0;
  });
}

void sum_block_int8(const SumBlockInt8Args& args, Stream stream) {
  check_host(stream, "sum_block_int8");
  TORCH_CHECK(args.numel >= 0, "zero::kernels::sum_block_int8: numel must be >= 0, got ",
              args.numel);
  TORCH_CHECK(args.world_size >= 1 && args.own_rank >= 0 && args.own_rank < args.world_size,
              "zero::kernels::sum_block_int8: own_rank must be in [0, world_size), got ",
              args.own_rank, " of ", args.world_size);
  if (args.numel == 0) return;
  const bool given = args.rows != nullptr ||
                     (args.own != nullptr && (args.received != nullptr || args.world_size == 1));
  TORCH_CHECK(given && args.shard != nullptr, "zero::kernels::sum_block_int8: null pointer for ",
              args.numel, " elements");
  const SumBlockInt8Range all{args.rows,
                              args.received,
                              args.own,
                              args.shard,
                              block_int8_bytes(args.numel),
                              4 * scales_of(args.numel),
                              0,
                              args.numel,
                              args.world_size,
                              args.own_rank,
                              args.scale,
                              args.accumulate};
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(1, [&](int64_t) { return args.numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    SumBlockInt8Range range = all;
    range.begin = begin;
    range.end = end;
    kernels.sum_block_int8(range);
  });
}

}  // namespace zero::kernels
