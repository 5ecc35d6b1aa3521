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
      {option<ClassOptions>(
           "lr", [](auto& o) -> auto& { return o.lr(); }),
       option<ClassOptions>(
           "alpha", [](auto& o) -> auto& { return o.alpha(); }),
       option<ClassOptions>(
           "eps", [](auto& o) -> auto& { return o.eps(); }),
       option<ClassOptions>(
           "weight_decay", [](auto& o) -> auto& { return o.weight_decay(); }),
       option<ClassOptions>(
           "momentum", [](auto& o) -> auto& { return o.momentum(); }),
       option<ClassOptions>(
           "centered", [](auto& o) -> auto& { return o.centered(); })},
      {state_tensor<ClassState>(
           "square_avg", [](auto& s) -> auto& { return s.square_avg(); }, StateRole::kPlain,
           Needed::kAlways),
       state_tensor<ClassState>(
           "momentum_buffer", [](auto& s) -> auto& { return s.momentum_buffer(); },
           StateRole::kPlain, Needed::kWithSomeOptions),
       state_tensor<ClassState>(
           "grad_avg", [](auto& s) -> auto& { return s.grad_avg(); }, StateRole::kPlain,
           Needed::kWithSomeOptions)},
      [](ClassState& s) -> int64_t& { return s.step(); });
  return adapter;
}

}  // namespace zero
