// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/fp32_batches.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "kernels/cast.h"
#include "kernels/exact_sum.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

constexpr int64_t kOfCpu = int64_t{1} << 18;
constexpr int64_t kOfDevice = int64_t{1} << 24;
static_assert(kOfCpu % kernels::kExactBlock == 0 && kOfDevice % kernels::kExactBlock == 0);

}  // namespace

int64_t fp32_batch_numel(at::Device device) { return device.is_cpu() ? kOfCpu : kOfDevice; }

Fp32Batches::Fp32Batches(at::Device device, c10::ScalarType dtype, int64_t numel, Use use)
    : dtype_(dtype),
      use_(std::move(use)),
      buffer_(at::empty({std::min(numel, fp32_batch_numel(device))},
                        at::TensorOptions().dtype(at::kFloat).device(device))) {}

void Fp32Batches::add(const void* values, int64_t numel) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype_));
  for (int64_t begin = 0; begin < numel;) {
    const int64_t piece = std::min(fp32_batch_numel(buffer_.device()), numel - begin);
    if (filled_ + piece > buffer_.numel()) flush();
    float* const to = buffer_.mutable_data_ptr<float>() + filled_;
    copies_.push_back({static_cast<const char*>(values) + begin * bytes, to, piece});
    spans_.push_back({to, piece});
    filled_ += piece;
    begin += piece;
  }
}

void Fp32Batches::flush() {
  if (filled_ == 0) return;
  kernels::cast_copy_spans(copies_, dtype_, at::kFloat, /*with_addends=*/false,
                           current_stream(buffer_.device()));
  use_(buffer_.narrow(0, 0, filled_), spans_);
  copies_.clear();
  spans_.clear();
  filled_ = 0;
}

}  // namespace zero
