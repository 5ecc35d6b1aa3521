// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/training/plain_moments.h"

#include <ATen/Functions.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <tuple>
#include <utility>

#include "tests/kernels/reference.h"
#include "tests/kernels/stored_reference.h"
#include "zero/lion.h"
#include "zero/update/shard_optimizer.h"

namespace zero {
namespace {

kernels::StateType type_of(Moments moments) {
  return moments == Moments::kInt8       ? kernels::StateType::kInt8
         : moments == Moments::kBFloat16 ? kernels::StateType::kBFloat16
                                         : kernels::StateType::kFloat;
}

at::Tensor decoded(const at::Tensor& bytes, bool root, Moments format, int64_t numel) {
  if (format == Moments::kFloat32) return bytes.view(at::kFloat);
  at::Tensor values = at::empty({numel}, at::kFloat);
  for (int64_t i = 0; i < numel; ++i) {
    values.mutable_data_ptr<float>()[i] =
        kernels::reference::stored_value(type_of(format), root, bytes.const_data_ptr(), numel, i);
  }
  return values;
}

// Rounded to nearest.
at::Tensor encoded(const at::Tensor& values, bool root, Moments format) {
  if (format == Moments::kFloat32) return values.view(at::kByte).clone();
  if (format == Moments::kBFloat16) return values.to(at::kBFloat16).view(at::kByte);
  const int64_t numel = values.numel();
  at::Tensor bytes = at::empty({moment_bytes(format, numel)}, at::kByte);
  const std::vector<uint32_t> halves(static_cast<size_t>(numel), 0x80008000U);
  kernels::reference::store_values(type_of(format), root, values.const_data_ptr<float>(), numel,
                                   halves.data(), bytes.mutable_data_ptr());
  return bytes;
}

template <class Segment>
Segment segment_of(const at::Tensor& master, const at::Tensor& gradient, Moments format,
                   int64_t number) {
  Segment s;
  s.master = master.mutable_data_ptr<float>();
  s.gradient = gradient.const_data_ptr<float>();
  s.numel = master.numel();
  s.state_type = type_of(format);
  s.parameter = number;
  return s;
}

template <class Options>
void set_adam_options(const torch::optim::OptimizerOptions& from, kernels::AdamOptions& to) {
  const auto& o = static_cast<const Options&>(from);
  to.lr = o.lr();
  std::tie(to.beta1, to.beta2) = o.betas();
  to.eps = o.eps();
  to.weight_decay = o.weight_decay();
  to.amsgrad = o.amsgrad();
}

}  // namespace

PlainMoments::PlainMoments(Inner inner, const std::vector<std::string>& names,
                           const std::vector<int64_t>& numels, Moments moments)
    : inner_(inner), moments_(moments) {
  for (const std::string& name : names) noise_numbers_.push_back(noise_number(name));
  for (const int64_t numel : numels) {
    State s;
    s.numel = numel;
    s.format = moments_of_parameter(moments, numel);
    s.first = at::zeros({moment_bytes(s.format, numel)}, at::kByte);
    s.second = s.first.clone();
    s.largest = at::zeros({numel});
    states_.push_back(std::move(s));
  }
}

void PlainMoments::step(size_t i, const at::Tensor& master, const at::Tensor& gradient,
                        const Clip& clip, const torch::optim::OptimizerOptions& options,
                        int64_t step) {
  State& state = states_[i];
  ++state.count;
  if (state.numel == 0) return;
  // In the order of the memory of a master, which is not that of a gradient.
  at::Tensor values = master.detach().to(at::kFloat).contiguous();
  at::Tensor g = gradient.to(at::kFloat).contiguous();
  const auto bound = static_cast<float>(clip.bound);
  g = g.clamp(-bound, bound).contiguous();
  const auto coefficient = static_cast<float>(clip.coefficient);
  const bool plain = state.format == Moments::kFloat32;
  namespace reference = kernels::reference;
  if (inner_ == Inner::kSgdMomentum) {
    auto s = segment_of<kernels::SgdSegment>(values, g, state.format, noise_numbers_[i]);
    s.momentum = state.first.mutable_data_ptr();
    s.first_step = state.count == 1;
    const auto& o = static_cast<const torch::optim::SGDOptions&>(options);
    kernels::SgdOptions k;
    k.lr = o.lr();
    k.momentum = o.momentum();
    k.weight_decay = o.weight_decay();
    k.nesterov = o.nesterov();
    k.noise_step = step;
    plain ? reference::sgd_step({s}, k, &coefficient, nullptr, at::kFloat)
          : reference::stored_sgd_step(s, k, &coefficient, at::kFloat);
  } else if (inner_ == Inner::kLion) {
    auto s = segment_of<kernels::LionSegment>(values, g, state.format, noise_numbers_[i]);
    s.exp_avg = state.first.mutable_data_ptr();
    const auto& o = static_cast<const LionOptions&>(options);
    kernels::LionOptions k;
    k.lr = o.lr();
    std::tie(k.beta1, k.beta2) = o.betas();
    k.weight_decay = o.weight_decay();
    k.noise_step = step;
    plain ? reference::lion_step({s}, k, &coefficient, nullptr, at::kFloat)
          : reference::stored_lion_step(s, k, &coefficient, at::kFloat);
  } else {
    auto s = segment_of<kernels::AdamSegment>(values, g, state.format, noise_numbers_[i]);
    s.exp_avg = state.first.mutable_data_ptr();
    s.exp_avg_sq = state.second.mutable_data_ptr();
    s.max_exp_avg_sq = state.largest.mutable_data_ptr<float>();
    s.step = state.count;
    kernels::AdamOptions k;
    k.decoupled = inner_ == Inner::kAdamW;
    k.decoupled ? set_adam_options<torch::optim::AdamWOptions>(options, k)
                : set_adam_options<torch::optim::AdamOptions>(options, k);
    k.noise_step = step;
    plain ? reference::adam_step({s}, k, &coefficient, nullptr, at::kFloat)
          : reference::stored_adam_step(s, k, &coefficient, at::kFloat);
  }
  master.copy_(values);
}

void PlainMoments::convert(Moments to) {
  moments_ = to;
  for (State& s : states_) {
    const Moments format = moments_of_parameter(to, s.numel);
    if (format == s.format) continue;
    s.first = encoded(decoded(s.first, /*root=*/false, s.format, s.numel), false, format);
    s.second = encoded(decoded(s.second, /*root=*/true, s.format, s.numel), true, format);
    s.format = format;
  }
}

void PlainMoments::select(size_t i, const at::Tensor& rows, int64_t row) {
  State& s = states_[i];
  const int64_t numel = rows.numel() * row;
  const Moments format = moments_of_parameter(moments_, numel);
  const auto selected = [&](const at::Tensor& values) {
    at::Tensor result = at::zeros({rows.numel(), row});
    const at::Tensor before = values.view({-1, row});
    for (int64_t r = 0; r < rows.numel(); ++r) {
      const auto from = rows[r].item<int64_t>();
      if (from >= 0) result[r].copy_(before[from]);
    }
    return result.view({-1});
  };
  const auto changed = [&](const at::Tensor& bytes, bool root) {
    return encoded(selected(decoded(bytes, root, s.format, s.numel)), root, format);
  };
  s.first = changed(s.first, /*root=*/false);
  s.second = changed(s.second, /*root=*/true);
  s.largest = selected(s.largest);
  s.numel = numel;
  s.format = format;
}

void PlainMoments::freeze(size_t i) {
  states_[i].first.zero_();
  states_[i].second.zero_();
  states_[i].count = 0;
}

}  // namespace zero
