// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/local_gradients.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <utility>

#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {
namespace {

void check_gradient(const at::Tensor& gradient, const Parameter& p) {
  TORCH_CHECK(gradient.layout() == at::kStrided, "gradient of ", p.name,
              ": expected a dense tensor, got layout ", gradient.layout(),
              "; build the layer with sparse=false");
  TORCH_CHECK(gradient.device() == p.tensor.device(), "gradient of ", p.name, ": expected device ",
              p.tensor.device(), ", got ", gradient.device(), "; keep them together");
  // Not the parameter's shape of today: a bucket has room for that of construction.
  TORCH_CHECK(gradient.sizes() == p.sizes, "gradient of ", p.name, ": expected shape ",
              at::IntArrayRef(p.sizes), " as at construction, got ", gradient.sizes(),
              "; give the parameter back its shape, or make a new optimizer");
  TORCH_CHECK(!gradient.is_complex(), "gradient of ", p.name, ": expected a real dtype, got ",
              gradient.scalar_type(),
              "; do not replace the parameter's storage by complex numbers");
}

bool is_known(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// Returns whether `gradient` is one flat stretch in the memory order of its parameter.
bool is_in_parameter_order(const at::Tensor& gradient, const Parameter& p) {
  return is_known(gradient.scalar_type()) &&
         (gradient.strides() == at::IntArrayRef(p.strides) || gradient.numel() <= 1);
}

at::Tensor in_parameter_order(const at::Tensor& gradient, const Parameter& p) {
  if (is_in_parameter_order(gradient, p)) return gradient;
  const auto dtype = gradient.scalar_type();
  at::Tensor copy = at::empty_strided(
      p.tensor.sizes(), p.strides, gradient.options().dtype(is_known(dtype) ? dtype : at::kFloat));
  return copy.copy_(gradient);
}

// sum = gradient, or sum += gradient.
void add(const at::Tensor& gradient, bool first, const at::Tensor& sum) {
  kernels::cast_copy(gradient.const_data_ptr(), gradient.scalar_type(), sum.mutable_data_ptr(),
                     at::kFloat, sum.numel(), first ? nullptr : sum.const_data_ptr(),
                     current_stream(sum.device()));
}

}  // namespace

bool LocalGradients::has(int64_t parameter) const {
  const State& state = states_[parameter];
  if (state.fp32.defined()) return true;
  return !state.averaged && table_.parameters()[parameter].tensor.grad().defined();
}

void LocalGradients::check(int64_t parameter) const {
  const Parameter& p = table_.parameters()[parameter];
  check_gradient(p.tensor.grad(), p);
}

void LocalGradients::keep(int64_t parameter) {
  check(parameter);
  const Parameter& p = table_.parameters()[parameter];
  State& state = states_[parameter];
  if (!fp32_ || p.tensor.scalar_type() == at::kFloat) {
    state.kept = true;
    return;
  }
  const at::Tensor gradient = in_parameter_order(p.tensor.grad(), p);
  const bool first = !state.fp32.defined();
  if (first) {
    state.fp32 = at::empty_strided(p.tensor.sizes(), p.strides,
                                   p.tensor.options().dtype(at::kFloat).requires_grad(false));
  }
  add(gradient, first, state.fp32);
  p.tensor.mutable_grad().reset();
}

at::Tensor LocalGradients::release(int64_t parameter) {
  const Parameter& p = table_.parameters()[parameter];
  State& state = states_[parameter];
  at::Tensor gradient = p.tensor.grad();
  if (gradient.defined()) gradient = in_parameter_order(gradient, p);
  if (state.fp32.defined()) {
    if (gradient.defined()) add(gradient, /*first=*/false, state.fp32);
    gradient = std::exchange(state.fp32, at::Tensor());
  }
  p.tensor.mutable_grad().reset();
  state.kept = false;
  return gradient;
}

std::optional<at::Tensor> LocalGradients::addend(int64_t parameter, const at::Tensor& gradient,
                                                 c10::ScalarType dtype) const {
  const Parameter& p = table_.parameters()[parameter];
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && tensor.device() == p.tensor.device() &&
           tensor.sizes() == p.sizes && is_in_parameter_order(tensor, p) && !tensor.is_neg();
  };
  const at::Tensor& grad = p.tensor.grad();
  const at::Tensor& sum = states_[parameter].fp32;
  if ((grad.defined() && sum.defined()) || !fits(gradient)) return std::nullopt;
  const at::Tensor& addend = sum.defined() ? sum : grad;
  // Accumulated apart, the sum would be rounded to its own dtype before it is to the bucket's.
  if (addend.defined() && (!fits(addend) || addend.scalar_type() != dtype)) return std::nullopt;
  return addend;
}

void LocalGradients::mark_average(int64_t parameter) {
  const at::Tensor& average = table_.parameters()[parameter].tensor.grad();
  State& state = states_[parameter];
  state.averaged = true;
  state.average = average.unsafeGetTensorImpl();
  state.average_version = average._version();
}

void LocalGradients::drop_average(int64_t parameter) {
  if (!std::exchange(states_[parameter].averaged, false)) return;
  table_.parameters()[parameter].tensor.mutable_grad().reset();
}

void LocalGradients::verify() const {
  for (size_t i = 0; i < states_.size(); ++i) {
    const State& g = states_[i];
    const Parameter& p = table_.parameters()[i];
    const at::Tensor& gradient = p.tensor.grad();
    TORCH_CHECK((!g.kept && !g.averaged) || gradient.defined(), "parameter ", p.name,
                ": expected the gradient that was accumulated since the last step, got none: it "
                "was reset by zero_grad() of the module or of a base class, which cannot reset "
                "what was sent; use ZeroOptimizer::zero_grad() on all ranks, or none at all");
    if (gradient.defined() && !g.averaged) check_gradient(gradient, p);
    TORCH_CHECK(!g.averaged || (g.average == gradient.unsafeGetTensorImpl() &&
                                g.average_version == gradient._version()),
                "parameter ", p.name,
                ": expected the averaged gradient in p.grad() to be only read, got a change, which "
                "would have no effect: step() uses the gradient shards. Clip with "
                "clip_grad_norm_() of the ZeroOptimizer, change gradients with register_hook(), or "
                "call zero_grad() on all ranks");
  }
}

void LocalGradients::discard() {
  for (size_t i = 0; i < states_.size(); ++i) {
    table_.parameters()[i].tensor.mutable_grad().reset();
    states_[i] = {};
  }
}

int64_t LocalGradients::bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < states_.size(); ++i) {
    const at::Tensor& grad = table_.parameters()[i].tensor.grad();
    if (!states_[i].averaged && grad.defined()) bytes += static_cast<int64_t>(grad.nbytes());
    if (states_[i].fp32.defined()) bytes += static_cast<int64_t>(states_[i].fp32.nbytes());
  }
  return bytes;
}

}  // namespace zero
