// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <torch/optim/adamw.h>

#include "zero/inner_optimizers/adam_family.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {

const OptimizerAdapter& adamw_adapter() {
  using namespace torch::optim;
  static const AdamAdapter<AdamW, AdamWOptions, AdamWParamState> adapter("AdamW", true);
  return adapter;
}

}  // namespace zero
