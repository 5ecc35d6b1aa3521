// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/fused_update.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

#include "kernels/adam.h"
#include "kernels/sgd.h"
#include "zero/device_stream.h"

namespace zero {
namespace {

// The state of one segment, made when it is first updated.
template <typename State>
State& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& master) {
  auto& slot = optimizer.state()[master.unsafeGetTensorImpl()];
  if (!slot) slot = std::make_unique<State>();
  return static_cast<State&>(*slot);
}

template <typename Options, typename State>
void adam(torch::optim::Optimizer& optimizer, int64_t group,
          const std::vector<FusedSegment>& segments, const float* coefficient,
          c10::ScalarType working_dtype, bool decoupled) {
  const auto& options = static_cast<const Options&>(optimizer.param_groups()[group].options());
  std::vector<kernels::AdamSegment> list;
  list.reserve(segments.size());
  for (const FusedSegment& s : segments) {
    auto& state = state_of<State>(optimizer, *s.master);
    if (!state.exp_avg().defined()) {
      state.step(0);
      state.exp_avg(at::zeros_like(*s.master));
      state.exp_avg_sq(at::zeros_like(*s.master));
    }
    if (options.amsgrad() && !state.max_exp_avg_sq().defined()) {
      state.max_exp_avg_sq(at::zeros_like(*s.master));
    }
    state.step(state.step() + 1);
    kernels::AdamSegment segment;
    segment.master = s.master->template mutable_data_ptr<float>();
    segment.exp_avg = state.exp_avg().template mutable_data_ptr<float>();
    segment.exp_avg_sq = state.exp_avg_sq().template mutable_data_ptr<float>();
    if (options.amsgrad()) {
      segment.max_exp_avg_sq = state.max_exp_avg_sq().template mutable_data_ptr<float>();
    }
    segment.gradient = s.gradient;
    segment.working = s.working;
    segment.numel = s.master->numel();
    segment.step = state.step();
    list.push_back(segment);
  }
  kernels::AdamOptions o;
  o.lr = options.lr();
  o.beta1 = std::get<0>(options.betas());
  o.beta2 = std::get<1>(options.betas());
  o.eps = options.eps();
  o.weight_decay = options.weight_decay();
  o.amsgrad = options.amsgrad();
  o.decoupled = decoupled;
  kernels::adam_step(list, o, coefficient, nullptr, working_dtype,
                     current_stream(segments.front().master->device()));
}

void sgd(torch::optim::Optimizer& optimizer, int64_t group,
         const std::vector<FusedSegment>& segments, const float* coefficient,
         c10::ScalarType working_dtype) {
  const auto& options =
      static_cast<const torch::optim::SGDOptions&>(optimizer.param_groups()[group].options());
  std::vector<kernels::SgdSegment> list;
  list.reserve(segments.size());
  for (const FusedSegment& s : segments) {
    kernels::SgdSegment segment;
    if (options.momentum() != 0) {
      auto& state = state_of<torch::optim::SGDParamState>(optimizer, *s.master);
      segment.first_step = !state.momentum_buffer().defined();
      if (segment.first_step) state.momentum_buffer(at::empty_like(*s.master));
      segment.momentum = state.momentum_buffer().mutable_data_ptr<float>();
    }
    segment.master = s.master->mutable_data_ptr<float>();
    segment.gradient = s.gradient;
    segment.working = s.working;
    segment.numel = s.master->numel();
    list.push_back(segment);
  }
  kernels::SgdOptions o;
  o.lr = options.lr();
  o.momentum = options.momentum();
  o.dampening = options.dampening();
  o.weight_decay = options.weight_decay();
  o.nesterov = options.nesterov();
  kernels::sgd_step(list, o, coefficient, nullptr, working_dtype,
                    current_stream(segments.front().master->device()));
}

}  // namespace

bool has_fused_update(const torch::optim::Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  return type == typeid(torch::optim::AdamW) || type == typeid(torch::optim::Adam) ||
         type == typeid(torch::optim::SGD);
}

void fused_update(torch::optim::Optimizer& optimizer, int64_t group,
                  const std::vector<FusedSegment>& segments, const float* coefficient,
                  c10::ScalarType working_dtype) {
  if (segments.empty()) return;
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(torch::optim::AdamW)) {
    adam<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(
        optimizer, group, segments, coefficient, working_dtype, true);
  } else if (type == typeid(torch::optim::Adam)) {
    adam<torch::optim::AdamOptions, torch::optim::AdamParamState>(
        optimizer, group, segments, coefficient, working_dtype, false);
  } else {
    sgd(optimizer, group, segments, coefficient, working_dtype);
  }
}

}  // namespace zero
