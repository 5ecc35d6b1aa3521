// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>

#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

using Class = torch::optim::Adagrad;
using ClassOptions = torch::optim::AdagradOptions;
using ClassState = torch::optim::AdagradParamState;

// The only class whose constructor makes state.
class AdagradAdapter : public ClassAdapter<Class, ClassOptions, ClassState> {
 public:
  AdagradAdapter()
      : ClassAdapter(
            "Adagrad",
            {ZERO_OPTION(ClassOptions, lr), ZERO_OPTION(ClassOptions, lr_decay),
             ZERO_OPTION(ClassOptions, weight_decay),
             ZERO_OPTION(ClassOptions, initial_accumulator_value), ZERO_OPTION(ClassOptions, eps)},
            {ZERO_STATE(ClassState, sum, kPlain, kAlways)}) {}

  std::unique_ptr<State> initial_state(const Optimizer& optimizer, int64_t group,
                                       const at::Tensor& parameter) const override {
    // Whatever the group has, as in the constructor.
    const auto& options = static_cast<const ClassOptions&>(part_of(optimizer, group).defaults());
    auto state = std::make_unique<ClassState>();
    state->step(0);
    state->sum(at::full_like(parameter, options.initial_accumulator_value()));
    return state;
  }
  bool is_unused(const State& state) const override {
    return static_cast<const ClassState&>(state).step() == 0;
  }
};

}  // namespace

const OptimizerAdapter& adagrad_adapter() {
  static const AdagradAdapter adapter;
  return adapter;
}

}  // namespace zero
