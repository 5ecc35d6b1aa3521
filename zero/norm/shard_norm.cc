// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/shard_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <cmath>

#include "kernels/exact_sum.h"
#include "zero/memory/device_stream.h"
#include "zero/norm/fp32_batches.h"
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

// Calls use(spans) for the segments of `group`, or all for -1: once, or where gradients are clamped
// or not fp32, for one batch of copies at a time.
void for_spans(const std::vector<SegmentTensors>& segments, int64_t group, const at::Tensor& bound,
               c10::function_ref<void(const std::vector<kernels::ConstSpan>& spans)> use) {
  if (segments.empty()) return;
  const at::Tensor& any = segments.front().gradient;
  if (!bound.defined() && any.scalar_type() == at::kFloat) {
    use(spans_of(segments, group));
    return;
  }
  const auto of_group = [&](const SegmentTensors& s) { return group < 0 || s.group == group; };
  int64_t numel = 0;
  for (const SegmentTensors& s : segments) numel += of_group(s) ? s.segment.numel : 0;
  Fp32Batches batches(any.device(), any.scalar_type(), numel,
                      [&](const at::Tensor& values, const std::vector<kernels::ConstSpan>& spans) {
                        if (bound.defined()) values.clamp_(-bound, bound);
                        use(spans);
                      });
  for (const SegmentTensors& s : segments) {
    if (of_group(s)) batches.add(s.gradient.const_data_ptr(), s.segment.numel);
  }
  batches.flush();
}

void add(const std::vector<SegmentTensors>& segments, int64_t group, double norm_type,
         double weight, const at::Tensor& bound, const at::Tensor& part) {
  for_spans(segments, group, bound, [&](const std::vector<kernels::ConstSpan>& spans) {
    add_to_norm_part(part, spans, norm_type, weight);
  });
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

ShardNorm exact_shard_norm(const std::vector<SegmentTensors>& segments, double norm_type,
                           at::Device device, Communicator& group, const at::Tensor& bound) {
  // A maximum has no order.
  if (std::isinf(norm_type)) return shard_norm(segments, {}, norm_type, device, group, bound);
  TORCH_INTERNAL_ASSERT(norm_type == 2.0, "no exact sum of other powers");
  const c10::OptionalDeviceGuard guard(device);
  const kernels::Stream stream = current_stream(device);
  at::Tensor sum =
      at::zeros({kernels::kExactNumel}, at::TensorOptions().dtype(at::kLong).device(device));
  for_spans(segments, -1, bound, [&](const std::vector<kernels::ConstSpan>& spans) {
    kernels::add_squares_exactly(spans, sum.mutable_data_ptr<int64_t>(), stream);
  });
  const at::Tensor limbs = sum.to(at::kDouble);
  group.all_reduce_sum(limbs, "gradient norm").wait();
  sum = limbs.to(at::kLong);
  const at::Tensor value = at::empty({}, limbs.options());
  kernels::value_of_exact_sum(sum.const_data_ptr<int64_t>(), value.mutable_data_ptr<double>(),
                              stream);
  return {value.sqrt(), sum.narrow(0, kernels::kExactLimbs, 2).sum().to(at::kDouble)};
}

}  // namespace zero
