// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// All that a step can change, to be compared bit by bit.
#pragma once

#include <ATen/Functions.h>
#include <torch/optim/adamw.h>

#include <cstring>
#include <vector>

#include "tests/support/fixed_gradients.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/zero_optimizer.h"

namespace zero {

// Moments and step counts.
inline std::vector<at::Tensor> state_of(const torch::optim::Optimizer& inner) {
  std::vector<at::Tensor> result;
  for (const auto& group : inner.param_groups()) {
    for (const at::Tensor& master : group.params()) {
      const auto found = inner.state().find(master.unsafeGetTensorImpl());
      if (found == inner.state().end()) continue;
      adapter_of(*found->second)
          .visit_tensors(*found->second, [&](const char*, const at::Tensor& tensor) {
            result.push_back(tensor.clone());
          });
      if (const auto* adam =
              dynamic_cast<const torch::optim::AdamWParamState*>(found->second.get())) {
        result.push_back(at::full({1}, static_cast<double>(adam->step())));
      }
    }
  }
  return result;
}

// Every bit a step can change: working parameters, masters, moments, step counts.
inline std::vector<at::Tensor> everything(const GivenGradients& model,
                                          const ZeroOptimizer& optimizer) {
  std::vector<at::Tensor> result = state_of(optimizer.inner());
  for (const at::Tensor& p : model.values) result.push_back(p.detach().clone());
  for (const auto& group : optimizer.inner().param_groups()) {
    for (const at::Tensor& master : group.params()) result.push_back(master.detach().clone());
  }
  return result;
}

// Collective. All of it on any device, also where masters are split, and the average.
inline std::vector<at::Tensor> all_bits(const GivenGradients& model, ZeroOptimizer& optimizer) {
  optimizer.wait_for(model);
  std::vector<at::Tensor> result = state_of(optimizer.inner());
  const auto add_values = [&] {
    for (const at::Tensor& p : model.values) result.push_back(p.detach().clone());
  };
  add_values();
  for (const at::Tensor& p : model.values) result.push_back(optimizer.master(p));
  if (optimizer.options().ema()) {
    const auto guard = optimizer.use_ema();
    add_values();
  }
  for (at::Tensor& t : result) t = t.cpu();
  return result;
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].nbytes() != b[i].nbytes()) return false;
    if (a[i].nbytes() > 0 &&
        std::memcmp(a[i].const_data_ptr(), b[i].const_data_ptr(), a[i].nbytes()) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace zero
