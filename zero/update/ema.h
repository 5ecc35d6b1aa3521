// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The exponential moving average of this rank's masters: ZeroOptions::ema.
//
// kernels/ema.h has the arithmetic.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "zero/options.h"

namespace zero {

class Ema {
 public:
  // Returns the masters of a bucket, 1-D fp32.
  using MasterOf = std::function<at::Tensor(int64_t bucket)>;
  // The average begins as the masters are.
  Ema(const EmaOptions& options, int64_t buckets, const MasterOf& master);
  // Begins again.
  void restart(const MasterOf& master);

  // The share of the masters in the average after `steps` steps, the last one included.
  static double weight(const EmaOptions& options, int64_t steps);

  // begin() comes first in an update, then update() once for each bucket, when its row is updated.
  void begin(int64_t steps);
  // The same where only the device knows: `steps` is 0-dim double there, and where `skipped`, 0-dim
  // or undefined, is not 0, the average stays as it is.
  void begin(const at::Tensor& steps, const at::Tensor& skipped);
  void update(int64_t bucket, const at::Tensor& master);

  const at::Tensor& row(int64_t bucket) const { return rows_[bucket]; }
  int64_t bytes() const;

 private:
  const EmaOptions options_;
  std::vector<at::Tensor> rows_;  // per bucket
  double weight_ = 0;
  at::Tensor weight_on_device_;  // in place of weight_, where it is defined
};

}  // namespace zero
