// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A module of tensors that belong to none. Internal.
#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "zero/zero_optimizer.h"

namespace zero {

// Returns a module with these very tensors, under these names: "layer.weight" is the parameter
// "weight" of its child "layer". Whether they require gradients stays. Throws c10::Error for a name
// that is empty, ends in a dot or is given twice, and for an undefined tensor.
std::shared_ptr<torch::nn::Module> listed_module(const NamedTensors& parameters,
                                                 const NamedTensors& buffers);

}  // namespace zero
