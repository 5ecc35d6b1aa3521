// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/norm.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cmath>
#include <vector>

#include "kernels/checks.h"
#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/check_spans.h"

namespace zero::kernels {
namespace {

// Halves recursively: the rounding error grows with the logarithm of the count.
double pairwise_sum(const double* values, int64_t count) {
  if (count <= 8) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
  }
  return pairwise_sum(values, count / 2) + pairwise_sum(values + count / 2, count - count / 2);
}

double sum_of_powers_range(const float* values, int64_t numel, double p) {
  double sum = 0.0;
  for (int64_t i = 0; i < numel; ++i) {
    sum += std::pow(std::fabs(static_cast<double>(values[i])), p);
  }
  return sum;
}

// Adds up block_sum(values, numel) over all blocks. Values that are not finite
// are looked for only where they have left a trace in the sum of their block.
template <class BlockSum>
void add_sums(c10::ArrayRef<ConstSpan> spans, double* result, const BlockSum& block_sum) {
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(static_cast<int64_t>(spans.size()), [&](int64_t i) { return spans[i].numel; });
  std::vector<double> sums(static_cast<size_t>(map.blocks()));
  std::atomic<int64_t> nonfinite{0};
  map.parallel_for_each_run([&](int64_t i, int64_t begin, int64_t end, int64_t block) {
    for (; begin < end; begin += BlockMap::kBlock, ++block) {
      const float* values = spans[i].data + begin;
      const int64_t numel = std::min(BlockMap::kBlock, end - begin);
      const double sum = block_sum(values, numel);
      sums[block] = sum;
      if (!std::isfinite(sum)) nonfinite += kernels.count_nonfinite(values, numel);
    }
  });
  result[0] += pairwise_sum(sums.data(), map.blocks());
  result[1] += static_cast<double>(nonfinite.load());
}

}  // namespace

void sum_of_squares(c10::ArrayRef<ConstSpan> spans, double* result, double* workspace,
                    Stream stream) {
  sum_of_abs_powers(spans, 2.0, result, workspace, stream);
}

void sum_of_abs_powers(c10::ArrayRef<ConstSpan> spans, double p, double* result, double* workspace,
                       Stream stream) {
  check_spans(spans, result, "sum_of_abs_powers");
  TORCH_CHECK(p > 0.0 && std::isfinite(p),
              "zero::kernels::sum_of_abs_powers: p must be positive and finite, got ", p,
              "; for the largest magnitude call max_abs_bits");
  if (stream.cuda) {
    TORCH_CHECK(workspace != nullptr,
                "zero::kernels::sum_of_abs_powers: workspace is null; on a "
                "device it is [kNormWorkspace] double");
    check_launch("sum_of_abs_powers",
                 cuda::sum_of_abs_powers(spans.data(), static_cast<int64_t>(spans.size()), p,
                                         result, workspace, kNormWorkspace, stream.handle));
    return;
  }
  const RangeKernels& kernels = range_kernels();
  if (p == 2.0) {
    add_sums(spans, result, kernels.sum_of_squares);
  } else if (p == 1.0) {
    add_sums(spans, result, kernels.sum_of_abs);
  } else {
    add_sums(spans, result, [p](const float* values, int64_t numel) {
      return sum_of_powers_range(values, numel, p);
    });
  }
}

void max_abs_bits(c10::ArrayRef<ConstSpan> spans, int64_t* result, Stream stream) {
  check_spans(spans, result, "max_abs_bits");
  if (stream.cuda) {
    check_launch("max_abs_bits",
                 cuda::max_abs_bits(spans.data(), static_cast<int64_t>(spans.size()), result,
                                    stream.handle));
    return;
  }
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(static_cast<int64_t>(spans.size()), [&](int64_t i) { return spans[i].numel; });
  std::atomic<int64_t> largest{*result};
  map.parallel_for_each_run([&](int64_t i, int64_t begin, int64_t end, int64_t) {
    const int64_t mine = kernels.max_abs_bits(spans[i].data + begin, end - begin);
    int64_t seen = largest.load();
    while (seen < mine && !largest.compare_exchange_weak(seen, mine)) {
    }
  });
  *result = largest.load();
}

}  // namespace zero::kernels
