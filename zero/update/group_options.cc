// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/group_options.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/memory/device_stream.h"
#include "zero/memory/parameter_table.h"

namespace zero {
namespace {

std::vector<std::vector<at::Tensor>> members_of(const torch::optim::Optimizer& inner) {
  std::vector<std::vector<at::Tensor>> result;
  for (const auto& group : inner.param_groups()) result.push_back(each_once(group.params()));
  return result;
}

std::vector<double> rates_of(const DeviceRates::ParamGroups& groups) {
  std::vector<double> rates;
  for (const auto& group : groups) rates.push_back(group.options().get_lr());
  return rates;
}

}  // namespace

DeviceRates::DeviceRates(const ParamGroups& groups, at::Device device)
    : rates_(at::empty({static_cast<int64_t>(groups.size())},
                       at::TensorOptions().dtype(at::kDouble).device(device))) {
  send(groups);
}

void DeviceRates::send(const ParamGroups& groups) {
  std::vector<double> rates = rates_of(groups);
  if (rates == sent_) return;
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(rates.size()) == rates_.numel());
  // Its memory is not given to anybody else before the copy is done.
  at::Tensor host = at::empty({rates_.numel()},
                              rates_.options().device(at::kCPU).pinned_memory(!rates_.is_cpu()));
  std::copy(rates.begin(), rates.end(), host.mutable_data_ptr<double>());
  rates_.copy_(host, /*non_blocking=*/true);
  sent_ = std::move(rates);
}

bool DeviceRates::are_sent(const ParamGroups& groups) const { return rates_of(groups) == sent_; }

GroupOptions::GroupOptions(torch::optim::Optimizer& inner, at::Device device)
    : inner_(inner), device_(device), members_(members_of(inner)) {
  for (const auto& group : inner.param_groups()) pushed_.push_back(group.options().clone());
}

void GroupOptions::check(const ParamGroups& groups) const {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  for (size_t g = 0; g < std::max(groups.size(), members_.size()); ++g) {
    TORCH_CHECK(
        g < members_.size() && g < groups.size() &&
            std::equal(groups[g].params().begin(), groups[g].params().end(), members_[g].begin(),
                       members_[g].end(), same),
        "parameter group ", g, ": expected the ", members_.size(),
        " groups as this optimizer left them, got ", groups.size(),
        " of which this one was added, removed or changed from outside (",
        g < groups.size() ? groups[g].params().size() : 0,
        " parameters); use freeze(), unfreeze() and add_param_group() of the ZeroOptimizer, and "
        "resize_rows() where a parameter gets other rows");
  }
  check_classes(groups);
}

void GroupOptions::check_classes(const ParamGroups& groups) const {
  TORCH_CHECK(groups.size() == pushed_.size(), "expected the ", pushed_.size(),
              " parameter groups of the inner optimizer, got ", groups.size(),
              "; use add_param_group() of the ZeroOptimizer");
  for (size_t g = 0; g < groups.size(); ++g) {
    TORCH_CHECK(groups[g].has_options(), "parameter group ", g, ": expected options of class ",
                c10::demangle(typeid(*pushed_[g]).name()),
                ", got none; give them back with set_options()");
    TORCH_CHECK(typeid(groups[g].options()) == typeid(*pushed_[g]), "parameter group ", g,
                ": expected options of class ", c10::demangle(typeid(*pushed_[g]).name()),
                ", which its optimizer reads, got ",
                c10::demangle(typeid(groups[g].options()).name()),
                "; change them in place, or give set_options() the same class");
  }
}

void GroupOptions::push(const ParamGroups& groups) {
  check_classes(groups);
  check_options(groups);  // NaN equals nothing, and would be taken for a change from outside below
  auto& inner_groups = inner_.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const OptimizerAdapter& adapter = adapter_of(*pushed_[g]);
    TORCH_CHECK(!locked_ || adapter.equal_options(groups[g].options(), *pushed_[g]),
                "param_groups(): expected the options that backward() updated with, since "
                "update_in_backward(true) updates before step(), got others; change them between "
                "step() and backward(), and give them back their values now, or go on from a "
                "checkpoint with a new optimizer where ranks had different ones");
    TORCH_CHECK(adapter.equal_options(inner_groups[g].options(), *pushed_[g]), "parameter group ",
                g,
                ": expected the inner optimizer's options as they were pushed, got others; "
                "change param_groups()[",
                g, "].options() of the ZeroOptimizer instead");
    // Copies: the caller goes on changing its own, and the next call compares with these.
    inner_groups[g].set_options(groups[g].options().clone());
    pushed_[g] = groups[g].options().clone();
  }
}

void GroupOptions::keep_rates_on_device() { rates_.emplace(inner_.param_groups(), device_); }

void GroupOptions::send_rates() {
  if (rates_) rates_->send(inner_.param_groups());  // in a capture nothing: check_captured_rates()
}

void GroupOptions::check_captured_rates(const ParamGroups& groups) const {
  if (!rates_ || !is_capturing(device_)) return;
  TORCH_CHECK(rates_->are_sent(groups),
              "CUDA graph capture: expected the learning rates that the last step used, or "
              "refresh_learning_rates() sent, got others; call refresh_learning_rates() before the "
              "capture begins");
}

void GroupOptions::refresh_rates(const ParamGroups& groups) {
  check(groups);
  TORCH_CHECK(!is_capturing(device_),
              "expected no capture in a CUDA graph, which would send these "
              "learning rates with each replay; call it before the capture, or before a replay");
  push(groups);
  send_rates();
}

}  // namespace zero
