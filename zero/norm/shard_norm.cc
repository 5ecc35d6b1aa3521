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
#include <set>

#include "kernels/exact_sum.h"
#include "zero/memory/device_stream.h"
#include "zero/norm/fp32_batches.h"
#include "zero/norm/norm_accumulator.h"

namespace zero {
namespace {

using Take = c10::function_ref<bool(const SegmentTensors& segment)>;

// Calls use(spans) for the segments to `take`: once, or where gradients are clamped or not fp32,
// for one batch of copies at a time.
void for_spans(const std::vector<SegmentTensors>& segments, Take take, const at::Tensor& bound,
               c10::function_ref<void(const std::vector<kernels::ConstSpan>& spans)> use) {
  if (segments.empty()) return;
  const at::Tensor& any = segments.front().gradient;
  if (!bound.defined() && any.scalar_type() == at::kFloat) {
    std::vector<kernels::ConstSpan> spans;
    for (const SegmentTensors& s : segments) {
      if (take(s)) spans.push_back({s.gradient.const_data_ptr<float>(), s.segment.numel});
    }
    use(spans);
    return;
  }
  int64_t numel = 0;
  for (const SegmentTensors& s : segments) numel += take(s) ? s.segment.numel : 0;
  Fp32Batches batches(any.device(), any.scalar_type(), numel,
                      [&](const at::Tensor& values, const std::vector<kernels::ConstSpan>& spans) {
                        if (bound.defined()) values.clamp_(-bound, bound);
                        use(spans);
                      });
  for (const SegmentTensors& s : segments) {
    if (take(s)) batches.add(s.gradient.const_data_ptr(), s.segment.numel);
  }
  batches.flush();
}

bool take_all(const SegmentTensors&) { return true; }

}  // namespace

ShardNorm shard_norm(const std::vector<SegmentTensors>& segments,
                     const std::vector<double>& weights, double norm_type, at::Device device,
                     Communicator& group, const at::Tensor& bound) {
  const at::Tensor parts = empty_norm_parts(1, norm_type, device);
  const auto add = [&](Take take, double weight) {
    for_spans(segments, take, bound, [&](const std::vector<kernels::ConstSpan>& spans) {
      add_to_norm_part(parts.select(0, 0), spans, norm_type, weight);
    });
  };
  if (std::isinf(norm_type)) {
    add(take_all, 1.0);
  } else {
    // All groups of one weight at once: of thousands of groups, most have the same.
    for (const double weight : std::set<double>(weights.begin(), weights.end())) {
      add([&](const SegmentTensors& s) { return weights[s.group] == weight; }, weight);
    }
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
  for_spans(segments, take_all, bound, [&](const std::vector<kernels::ConstSpan>& spans) {
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
