// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The learning rates of parameter groups in memory of a device, where the kernels of a CUDA graph
// read them whenever it is replayed.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace zero {

class DeviceRates {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // Sends those of `groups`.
  DeviceRates(const ParamGroups& groups, at::Device device);

  // Sends those of `groups`, as many as before, if they have changed: behind what the current
  // stream has to do, and without a wait of the host. Not in a capture, whose graph would send them
  // again with each replay.
  void send(const ParamGroups& groups);
  // Returns whether those of `groups` were the last to be sent.
  bool are_sent(const ParamGroups& groups) const;
  // [1], valid for the lifetime of this.
  const double* of(int64_t group) const { return rates_.const_data_ptr<double>() + group; }

 private:
  at::Tensor rates_;  // [groups] fp64
  std::vector<double> sent_;
};

}  // namespace zero
