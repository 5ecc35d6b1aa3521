// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <torch/optim/adam.h>

#include "zero/inner_optimizers/adam_family.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

const OptimizerAdapter& adam_adapter() {
  using namespace torch::optim;
  static const AdamAdapter<Adam, AdamOptions, AdamParamState> adapter("Adam", false);
  return adapter;
}

}  // namespace zero
