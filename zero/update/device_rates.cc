// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/device_rates.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace zero {
namespace {

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

}  // namespace zero
