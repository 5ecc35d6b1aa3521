// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/sgd.h"

#include <torch/optim/sgd.h>

#include <vector>

#include "zero/inner_optimizers/class_adapter.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

using Class = torch::optim::SGD;
using ClassOptions = torch::optim::SGDOptions;
using ClassState = torch::optim::SGDParamState;

class SgdAdapter : public ClassAdapter<Class, ClassOptions, ClassState>, public FusedUpdate {
 public:
  SgdAdapter()
      : ClassAdapter("SGD",
                     {ZERO_OPTION(ClassOptions, lr), ZERO_OPTION(ClassOptions, momentum),
                      ZERO_OPTION(ClassOptions, dampening), ZERO_OPTION(ClassOptions, weight_decay),
                      ZERO_OPTION(ClassOptions, nesterov)},
                     {ZERO_STATE(ClassState, momentum_buffer, kAverage, kWithSomeOptions)}) {}

  const FusedUpdate* fused() const override { return this; }

  bool prepare_state(Optimizer& optimizer, int64_t group, const at::Tensor& master,
                     Moments moments) const override {
    return prepare(optimizer, options_of(optimizer, group), master, moments).made;
  }

  bool uses_state(const Optimizer& optimizer, int64_t group) const override {
    return options_of(optimizer, group).momentum() != 0;
  }

  void update(Optimizer& optimizer, int64_t group, const std::vector<FusedSegment>& segments,
              const FusedScalars& scalars, c10::ScalarType working_dtype,
              kernels::Stream stream) const override {
    const ClassOptions& options = options_of(optimizer, group);
    std::vector<kernels::SgdSegment> list;
    list.reserve(segments.size());
    for (const FusedSegment& s : segments) {
      auto segment = kernel_segment<kernels::SgdSegment>(s);
      const auto [state, made] = prepare(optimizer, options, *s.master, s.moments);
      segment.first_step = made;
      if (state != nullptr) {
        segment.momentum = state->momentum_buffer().mutable_data_ptr();
        segment.state_type = state_type(state->momentum_buffer());
      }
      segment.device_step = s.count;
      list.push_back(segment);
    }
    auto o = kernel_options<kernels::SgdOptions>(scalars);
    o.lr = options.lr();
    o.momentum = options.momentum();
    o.dampening = options.dampening();
    o.weight_decay = options.weight_decay();
    o.nesterov = options.nesterov();
    kernels::sgd_step(list, o, scalars.coefficient, scalars.nonfinite, working_dtype, stream);
  }

  int64_t update_count(const Optimizer& optimizer, const at::Tensor& master) const override {
    const ClassState* state = find_state(optimizer, master);
    return state != nullptr && state->momentum_buffer().defined() ? 1 : 0;
  }

 private:
  // The state of a segment, and whether its tensor was made just now.
  struct Prepared {
    ClassState* state;
    bool made;
  };

  // Without momentum there is none.
  static Prepared prepare(Optimizer& optimizer, const ClassOptions& options,
                          const at::Tensor& master, Moments moments) {
    if (options.momentum() == 0) return {nullptr, false};
    ClassState& state = state_of(optimizer, master);
    const bool made = !state.momentum_buffer().defined();
    if (made) state.momentum_buffer(empty_state(master, moments));
    return {&state, made};
  }
};

}  // namespace

const OptimizerAdapter& sgd_adapter() {
  static const SgdAdapter adapter;
  return adapter;
}

}  // namespace zero
