// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The parameter groups that users see, and how their options become those of the inner optimizer:
// before each update, and learning rates in the memory of a device too.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace zero {

// The learning rates of parameter groups in memory of a device, where the kernels of a CUDA graph
// read them whenever it is replayed.
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

class GroupOptions {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  // `inner`, which must outlive this, has the parameters that users see still. They are on
  // `device`.
  GroupOptions(torch::optim::Optimizer& inner, at::Device device);

  // The parameters of each group at construction, each once.
  const std::vector<std::vector<at::Tensor>>& members() const { return members_; }
  // Throws c10::Error unless `groups` have these parameters, and options of the classes that they
  // had.
  void check(const ParamGroups& groups) const;
  // Makes `groups`' options the inner optimizer's. Throws c10::Error where the inner options are
  // not what the last call left, and where they are locked() and `groups` have others.
  void push(const ParamGroups& groups);
  // An update that is not over reads them.
  bool locked() const { return locked_; }
  void set_locked(bool locked) { locked_ = locked; }

  // From now on kernels read learning rates on the device, so that a CUDA graph can.
  void keep_rates_on_device();
  // That of a group, valid for the lifetime of this; null where kernels are given it.
  const double* rate_of(int64_t group) const { return rates_ ? rates_->of(group) : nullptr; }
  // Sends those that were pushed last to where kernels read them, except in a capture.
  void send_rates();
  // Throws where a capture in a CUDA graph would read other learning rates than those of `groups`.
  void check_captured_rates(const ParamGroups& groups) const;
  // ZeroOptimizer::refresh_learning_rates().
  void refresh_rates(const ParamGroups& groups);

 private:
  void check_classes(const ParamGroups& groups) const;

  torch::optim::Optimizer& inner_;
  const at::Device device_;
  const std::vector<std::vector<at::Tensor>> members_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> pushed_;
  bool locked_ = false;
  std::optional<DeviceRates> rates_;
};

}  // namespace zero
