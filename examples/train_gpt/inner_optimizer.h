// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The optimizers that train_gpt offers, as they are given to a ZeroOptimizer.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "examples/train_gpt/gpt.h"
#include "examples/train_gpt/train_options.h"

namespace zero::examples {

// Makes options.optimizer over the parameters of `model`. Matrices decay; biases and layer norms
// do not, which have no redundancy to shed. "muon" trains the matrices of the blocks by Muon, with
// options.muon_lr, and everything else by AdamW.
std::unique_ptr<torch::optim::Optimizer> make_inner_optimizer(Gpt& model,
                                                              const TrainOptions& options);

}  // namespace zero::examples
