// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/shard_norm.h"

#include <ATen/ops/isfinite.h>

#include <cmath>

#include "zero/norm/norm_accumulator.h"

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

// Adds the segments of `group`, or all for -1.
void add(const std::vector<SegmentTensors>& segments, int64_t group, double norm_type,
         double weight, const at::Tensor& bound, const at::Tensor& part) {
  if (!bound.defined()) {
    add_to_norm_part(part, spans_of(segments, group), norm_type, weight);
    return;
  }
  const at::Tensor low = -bound;
  for (const SegmentTensors& s : segments) {
    if (group >= 0 && s.group != group) continue;
    const at::Tensor clamped = s.gradient.clamp(low, bound);
    const std::vector<kernels::ConstSpan> span{{clamped.const_data_ptr<float>(), s.segment.numel}};
    add_to_norm_part(part, span, norm_type, weight);
  }
}

}  // namespace

ShardNorm shard_norm(const std::vector<SegmentTensors>& segments,
                     const std::vector<double>& weights, double norm_type, at::Device device,
                     Communicator& group, const at::Tensor& bound) {
  const at::Tensor parts = empty_norm_parts(1, norm_type, device);
  if (std::isinf(norm_type)) add(segments, -1, norm_type, 1.0, bound, parts.select(0, 0));
  for (size_t g = 0; g < weights.size() && !std::isinf(norm_type); ++g) {
    add(segments, static_cast<int64_t>(g), norm_type, weights[g], bound, parts.select(0, 0));
  }
  all_reduce_norm_parts(parts, group, "gradient norm").wait();
  const at::Tensor part = parts.select(0, 0);
  ShardNorm result;
  result.norm = norm_of(part, norm_type);
  // Not by the norm: a sum of powers may overflow although every value is finite.
  result.nonfinite = std::isinf(norm_type) ? at::isfinite(result.norm).logical_not().to(at::kDouble)
                                           : part.select(0, 1);
  return result;
}

}  // namespace zero
