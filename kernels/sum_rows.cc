// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/sum_rows.h"

#include <c10/util/Exception.h>

#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/element_type.h"

namespace zero::kernels {

void sum_rows(const SumRowsArgs& args, Stream stream) {
  const ElementType type = element_type(args.dtype, "sum_rows", "dtype");
  TORCH_CHECK(args.numel >= 0, "zero::kernels::sum_rows: numel must be >= 0, got ", args.numel);
  TORCH_CHECK(args.world_size >= 1 && args.own_rank >= 0 && args.own_rank < args.world_size,
              "zero::kernels::sum_rows: own_rank must be in [0, world_size), got ", args.own_rank,
              " of ", args.world_size);
  if (args.numel == 0) return;
  const bool given = args.rows != nullptr ? !stream.cuda
                                          : args.own != nullptr &&
                                                (args.received != nullptr || args.world_size == 1);
  TORCH_CHECK(given && args.shard != nullptr, "zero::kernels::sum_rows: null pointer for ",
              args.numel, " elements, or row addresses for a stream");

  const SumRowsRange all{args.rows,     0,          args.received, args.own,
                         args.shard,    args.numel, args.numel,    args.world_size,
                         args.own_rank, type,       args.scale,    args.accumulate};
  if (stream.cuda) {
    check_launch("sum_rows", cuda::sum_rows(all, stream.handle));
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const int64_t size = element_size(type);
  const BlockMap map(1, [&](int64_t) { return args.numel; });
  map.parallel_for_each_run([&](int64_t, int64_t begin, int64_t end, int64_t) {
    SumRowsRange range = all;
    range.begin = begin;
    if (range.received != nullptr) {
      range.received = static_cast<const char*>(all.received) + begin * size;
    }
    if (range.own != nullptr) range.own = static_cast<const char*>(all.own) + begin * size;
    range.shard = all.shard + begin;
    range.numel = end - begin;
    kernels.sum_rows(range);
  });
}

}  // namespace zero::kernels
