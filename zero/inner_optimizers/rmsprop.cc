// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <torch/optim/rmsprop.h>

#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

using Class = torch::optim::RMSprop;
using ClassOptions = torch::optim::RMSpropOptions;
using ClassState = torch::optim::RMSpropParamState;

class RmspropAdapter final : public ClassAdapter<Class, ClassOptions, ClassState> {
 public:
  using ClassAdapter::ClassAdapter;

  std::vector<std::string> optional_state(const Options& options) const override {
    const auto& o = static_cast<const ClassOptions&>(options);
    std::vector<std::string> names;
    if (o.momentum() > 0) names.emplace_back("momentum_buffer");
    if (o.centered()) names.emplace_back("grad_avg");
    return names;
  }
};

}  // namespace

const OptimizerAdapter& rmsprop_adapter() {
  static const RmspropAdapter adapter(
      "RMSprop",
      {ZERO_OPTION(ClassOptions, lr), ZERO_OPTION(ClassOptions, alpha),
       ZERO_OPTION(ClassOptions, eps), ZERO_OPTION(ClassOptions, weight_decay),
       ZERO_OPTION(ClassOptions, momentum), ZERO_OPTION(ClassOptions, centered)},
      {ZERO_STATE(ClassState, square_avg, kPlain, kAlways),
       ZERO_STATE(ClassState, momentum_buffer, kPlain, kWithSomeOptions),
       ZERO_STATE(ClassState, grad_avg, kPlain, kWithSomeOptions)});
  return adapter;
}

}  // namespace zero
