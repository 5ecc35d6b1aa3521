// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A model whose gradients are given, for tests about single numbers.
#pragma once

#include <ATen/Functions.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace zero {

struct GivenGradients : torch::nn::Module {
  // One parameter for each tensor, with its values and dtype.
  explicit GivenGradients(const std::vector<at::Tensor>& initial) {
    for (size_t i = 0; i < initial.size(); ++i) {
      values.push_back(register_parameter("value" + std::to_string(i), initial[i].clone()));
    }
  }

  // A loss in fp32 whose gradient for values[i] is gradients[i], rounded to the parameter's
  // dtype. An undefined tensor, or none: the parameter is not used.
  at::Tensor loss(const std::vector<at::Tensor>& gradients) const {
    at::Tensor sum = at::zeros({}, values.front().options().dtype(at::kFloat));
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) sum = sum + at::sum(values[i].to(at::kFloat) * gradients[i]);
    }
    return sum;
  }

  std::vector<at::Tensor> values;
};

}  // namespace zero
