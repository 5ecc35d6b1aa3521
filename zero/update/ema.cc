// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/ema.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "kernels/ema.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

// Of the warm-up: (1 + steps) / (10 + steps).
constexpr int64_t kAdded = 1, kAddedBelow = 10;

}  // namespace

Ema::Ema(const EmaOptions& options, int64_t buckets, const MasterOf& master) : options_(options) {
  for (int64_t b = 0; b < buckets; ++b) rows_.push_back(master(b).detach().clone());
}

void Ema::restart(const MasterOf& master) {
  for (int64_t b = 0; b < std::ssize(rows_); ++b) rows_[b].copy_(master(b));
}

double Ema::weight(const EmaOptions& options, int64_t steps) {
  if (!options.warm_up()) return 1.0 - options.decay();
  const double early =
      static_cast<double>(steps + kAdded) / static_cast<double>(steps + kAddedBelow);
  return 1.0 - std::min(options.decay(), early);
}

void Ema::begin(int64_t steps) {
  weight_on_device_ = at::Tensor();
  weight_ = weight(options_, steps);
}

void Ema::begin(const at::Tensor& steps, const at::Tensor& skipped) {
  at::Tensor decay = (steps + kAdded) / (steps + kAddedBelow);
  options_.warm_up() ? decay.clamp_max_(options_.decay()) : decay.fill_(options_.decay());
  at::Tensor weight = 1.0 - decay;
  if (skipped.defined()) weight = at::where(skipped.ne(0), at::zeros_like(weight), weight);
  weight_on_device_ = weight.to(at::kFloat);
}

void Ema::update(int64_t bucket, const at::Tensor& master) {
  const at::Tensor& row = rows_[bucket];
  const float* weight =
      weight_on_device_.defined() ? weight_on_device_.const_data_ptr<float>() : nullptr;
  kernels::ema_step(kernels::EmaSegment{row.mutable_data_ptr<float>(),
                                        master.const_data_ptr<float>(), row.numel()},
                    static_cast<float>(weight_), weight, current_stream(row.device()));
}

int64_t Ema::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& row : rows_) bytes += static_cast<int64_t>(row.nbytes());
  return bytes;
}

}  // namespace zero
