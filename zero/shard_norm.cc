// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/shard_norm.h"

#include <ATen/ops/zeros.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/norm.h"
#include "zero/device_stream.h"

namespace zero {
namespace {

std::vector<kernels::ConstSpan> spans_of(const std::vector<SegmentTensors>& segments,
                                         int64_t group) {
  std::vector<kernels::ConstSpan> spans;
  for (const SegmentTensors& s : segments) {
    if (group < 0 || s.group == group) {
      spans.push_back({s.gradient.const_data_ptr<float>(), s.segment.numel});
    }
  }
  return spans;
}

at::TensorOptions options_like(const std::vector<SegmentTensors>& segments) {
  return segments.empty() ? at::TensorOptions() : segments.front().gradient.options();
}

ShardNorm maximum(const std::vector<SegmentTensors>& segments, Communicator& group) {
  at::Tensor bits = at::zeros({1}, options_like(segments).dtype(at::kLong));
  kernels::max_abs_bits(spans_of(segments, -1), bits.mutable_data_ptr<int64_t>(),
                        current_stream(bits.device()));
  group.all_reduce_max(bits, "infinity norm").wait();
  constexpr int64_t kInfinityBits = 0x7f800000;
  const auto value = bits.item<int64_t>();
  const auto low = static_cast<uint32_t>(value);
  float maximum = 0;
  std::memcpy(&maximum, &low, sizeof(maximum));
  return {maximum, value >= kInfinityBits};
}

}  // namespace

ShardNorm shard_norm(const std::vector<SegmentTensors>& segments,
                     const std::vector<double>& weights, double norm_type, Communicator& group) {
  if (std::isinf(norm_type)) return maximum(segments, group);
  const auto options = options_like(segments).dtype(at::kDouble);
  at::Tensor total = at::zeros({2}, options);
  for (size_t g = 0; g < weights.size(); ++g) {
    const auto spans = spans_of(segments, static_cast<int64_t>(g));
    if (spans.empty()) continue;
    at::Tensor part = at::zeros({2}, options);
    auto* result = part.mutable_data_ptr<double>();
    if (norm_type == 2.0) {
      kernels::sum_of_squares(spans, result, current_stream(part.device()));
    } else {
      kernels::sum_of_abs_powers(spans, norm_type, result, current_stream(part.device()));
    }
    total.add_(part, weights[g]);
  }
  group.all_reduce_sum(total, "gradient norm").wait();
  const at::Tensor host = total.cpu();
  const auto* sums = host.const_data_ptr<double>();
  ShardNorm result;
  result.norm = norm_type == 2.0 ? std::sqrt(sums[0]) : std::pow(sums[0], 1.0 / norm_type);
  result.nonfinite = sums[1] != 0;
  return result;
}

}  // namespace zero
