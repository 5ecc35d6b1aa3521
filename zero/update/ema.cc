// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/ema.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace zero {
namespace {

// Of the warm-up: (1 + steps) / (10 + steps).
constexpr int64_t kAdded = 1, kAddedBelow = 10;

// Elements of a row that are taken at a time: on a CPU those that stay in the cache of a core
// between the three passes over them, as many as libtorch gives to a thread; on a GPU few enough to
// be little memory.
constexpr int64_t kPieceOfThread = 32 << 10;
constexpr int64_t kPieceOfGpu = 4 << 20;

int64_t piece_on(at::Device device) {
  return device.is_cpu() ? kPieceOfThread * at::get_num_threads() : kPieceOfGpu;
}

}  // namespace

Ema::Ema(const EmaOptions& options, const std::vector<at::Tensor>& masters) : options_(options) {
  for (const at::Tensor& master : masters) rows_.push_back(master.detach().clone());
}

void Ema::restart(const std::vector<at::Tensor>& masters) {
  for (size_t b = 0; b < rows_.size(); ++b) rows_[b].copy_(masters[b]);
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

void Ema::follow(int64_t bucket, const at::Tensor& master) {
  const at::Tensor& row = rows_[bucket];
  const int64_t piece = piece_on(row.device());
  if (!difference_.defined() || difference_.numel() < std::min(piece, row.numel())) {
    difference_ = at::empty({std::min(piece, row.numel())}, row.options());
  }
  for (int64_t begin = 0; begin < row.numel(); begin += piece) {
    const int64_t numel = std::min(piece, row.numel() - begin);
    at::Tensor average = row.narrow(0, begin, numel);
    at::Tensor difference = difference_.narrow(0, 0, numel);
    at::sub_out(difference, master.narrow(0, begin, numel), average);
    weight_on_device_.defined() ? difference.mul_(weight_on_device_) : difference.mul_(weight_);
    average.add_(difference);
  }
}

int64_t Ema::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& row : rows_) bytes += static_cast<int64_t>(row.nbytes());
  return bytes;
}

}  // namespace zero
