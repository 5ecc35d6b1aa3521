// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/norm_accumulator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <map>

#include "kernels/norm.h"
#include "zero/memory/device_stream.h"
#include "zero/norm/fp32_batches.h"

namespace zero {
namespace {

// The elements in memory order, without a copy where memory is dense.
at::Tensor flat(const at::Tensor& gradient) {
  TORCH_CHECK(gradient.layout() == at::kStrided && !gradient.is_complex() &&
                  at::isFloatingType(gradient.scalar_type()),
              "gradient norm: expected dense gradients of a real floating dtype, got layout ",
              gradient.layout(), " and dtype ", gradient.scalar_type(),
              "; build the layer without sparse or complex gradients");
  const at::Tensor dense =
      gradient.is_non_overlapping_and_dense() ? gradient : gradient.contiguous();
  return dense.detach().as_strided({dense.numel()}, {1}, dense.storage_offset());
}

void add_doubles(const at::Tensor& part, const at::Tensor& values, double norm_type) {
  for (const at::Tensor& batch : values.split(fp32_batch_numel(values.device()))) {
    const at::Tensor piece = batch.abs();
    if (std::isinf(norm_type)) {
      // The maximum of values with a NaN is some NaN, with any sign.
      part.copy_(at::maximum(part, piece.max().abs().reshape({1}).view(at::kLong)));
    } else {
      part.select(0, 1).add_(at::isfinite(piece).logical_not().sum());
      part.select(0, 0).add_(piece.pow(norm_type).sum());
    }
  }
}

}  // namespace

at::Tensor empty_norm_parts(int64_t parts, double norm_type, at::Device device) {
  const bool largest = std::isinf(norm_type);
  return at::zeros({parts, largest ? 1 : 2},
                   at::TensorOptions().dtype(largest ? at::kLong : at::kDouble).device(device));
}

void add_to_norm_part(const at::Tensor& part, const std::vector<kernels::ConstSpan>& spans,
                      double norm_type, double weight) {
  if (spans.empty()) return;
  const c10::OptionalDeviceGuard guard(part.device());
  const kernels::Stream stream = current_stream(part.device());
  if (std::isinf(norm_type)) {
    at::Tensor bits = at::zeros({1}, part.options());
    kernels::max_abs_bits(spans, bits.mutable_data_ptr<int64_t>(), stream);
    // From the pattern of a float to that of the same number as a double.
    const at::Tensor wide = bits.to(at::kInt).view(at::kFloat).to(at::kDouble).view(at::kLong);
    part.copy_(at::maximum(part, wide));
    return;
  }
  at::Tensor sums = at::zeros({2}, part.options());
  // From torch's allocator, which reuses the memory in the order of the current stream.
  const at::Tensor workspace =
      at::empty({stream.cuda ? kernels::kNormWorkspace : 0}, part.options());
  kernels::sum_of_abs_powers(spans, norm_type, sums.mutable_data_ptr<double>(),
                             workspace.mutable_data_ptr<double>(), stream);
  // Not by a product with 0, which is NaN for a sum that is not finite.
  if (weight != 0.0) part.select(0, 0).add_(sums.select(0, 0), weight);
  part.select(0, 1).add_(sums.select(0, 1));
}

void add_to_norm_part(const at::Tensor& part, const std::vector<at::Tensor>& gradients,
                      double norm_type) {
  const c10::OptionalDeviceGuard guard(part.device());
  std::vector<at::Tensor> alive;  // copies of gradients that were not dense
  std::vector<kernels::ConstSpan> spans;
  std::map<c10::ScalarType, int64_t> converted;  // how many elements, by dtype
  for (const at::Tensor& gradient : gradients) {
    const at::Tensor values = flat(gradient);
    if (values.numel() == 0) continue;
    if (values.scalar_type() == at::kFloat) {
      spans.push_back({values.const_data_ptr<float>(), values.numel()});
    } else if (values.scalar_type() == at::kDouble) {
      add_doubles(part, values, norm_type);
      continue;
    } else {
      converted[values.scalar_type()] += values.numel();
    }
    alive.push_back(values);
  }
  add_to_norm_part(part, spans, norm_type, 1.0);
  for (const auto& [dtype, numel] : converted) {
    const auto add_row = [&](const at::Tensor& row, const std::vector<kernels::ConstSpan>&) {
      add_to_norm_part(part, {{row.const_data_ptr<float>(), row.numel()}}, norm_type, 1.0);
    };
    Fp32Batches batches(part.device(), dtype, numel, add_row);
    for (const at::Tensor& values : alive) {
      if (values.scalar_type() == dtype) batches.add(values.const_data_ptr(), values.numel());
    }
    batches.flush();
  }
}

Pending all_reduce_norm_parts(const at::Tensor& parts, Communicator& group,
                              const std::string& label) {
  const at::Tensor flat = parts.view({-1});
  return parts.scalar_type() == at::kLong ? group.all_reduce_max(flat, label)
                                          : group.all_reduce_sum(flat, label);
}

at::Tensor combine_norm_parts(const at::Tensor& parts) {
  return parts.scalar_type() == at::kLong ? parts.amax(0) : parts.sum(0);
}

at::Tensor norm_of(const at::Tensor& part, double norm_type) {
  if (std::isinf(norm_type)) return part.view(at::kDouble).select(0, 0).clone();
  const at::Tensor sum = part.select(0, 0);
  if (norm_type == 1.0) return sum.clone();
  return norm_type == 2.0 ? sum.sqrt() : sum.pow(1.0 / norm_type);
}

}  // namespace zero
