// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/exact_sum.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>

#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/check_spans.h"
#include "kernels/detail/exact_sum.h"

namespace zero::kernels {
namespace {

static_assert(BlockMap::kBlock % kExactBlock == 0, "a thread begins at a block");

// Each block adds less than 2^32 to a limb, which 2^30 of them do not make overflow.
constexpr int64_t kMostBlocks = int64_t{1} << 30;

void check_blocks(c10::ArrayRef<ConstSpan> spans) {
  int64_t blocks = 0;
  for (const ConstSpan& span : spans) {
    blocks += span.numel / kExactBlock + (span.numel % kExactBlock != 0 ? 1 : 0);
    TORCH_CHECK(blocks <= kMostBlocks, "zero::kernels::add_squares_exactly: more than ",
                kMostBlocks, " blocks of ", kExactBlock, " elements in one call");
  }
}

}  // namespace

void add_squares_exactly(c10::ArrayRef<ConstSpan> spans, int64_t* sum, Stream stream) {
  check_spans(spans, sum, "add_squares_exactly");
  check_blocks(spans);
  if (stream.cuda) {
    check_launch("add_squares_exactly",
                 cuda::add_squares_exactly(spans.data(), static_cast<int64_t>(spans.size()), sum,
                                           stream.handle));
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(static_cast<int64_t>(spans.size()), [&](int64_t i) { return spans[i].numel; });
  std::array<std::atomic<int64_t>, kExactNumel> total{};
  map.parallel_for_each_run([&](int64_t i, int64_t begin, int64_t end, int64_t) {
    std::array<int64_t, kExactNumel> mine{};
    kernels.add_squares_exactly(spans[i].data + begin, end - begin, mine.data());
    for (int64_t k = 0; k < kExactNumel; ++k) {
      if (mine[k] != 0) total[k] += mine[k];
    }
  });
  for (int64_t k = 0; k < kExactNumel; ++k) sum[k] += total[k].load();
  carry_limbs(sum);
}

void value_of_exact_sum(const int64_t* sum, double* value, Stream stream) {
  TORCH_CHECK(sum != nullptr && value != nullptr,
              "zero::kernels::value_of_exact_sum: sum or value is null");
  if (stream.cuda) {
    check_launch("value_of_exact_sum", cuda::value_of_exact_sum(sum, value, stream.handle));
    return;
  }
  *value = rounded_sum(sum);
}

}  // namespace zero::kernels
