// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/skip_rule.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "zero/base/json_text.h"

namespace zero {
namespace {

// The known values, the oldest first.
std::vector<double> known_values(const at::Tensor& values, const at::Tensor& known) {
  if (!values.defined()) return {};
  const at::Tensor host = values.to(at::kCPU);
  const double* const end = host.const_data_ptr<double>() + host.numel();
  return {end - static_cast<int64_t>(known.item<double>()), end};
}

std::vector<double> parse(const std::string& state, const char* key) {
  nlohmann::json json;
  try {
    json = parse_json(state);
  } catch (const nlohmann::json::exception&) {  // it stays null
  }
  const bool good = json.is_object() && json.contains(key) && json[key].is_array() &&
                    std::all_of(json[key].begin(), json[key].end(),
                                [](const auto& value) { return value.is_number(); });
  TORCH_CHECK(good, "OutlierRule: expected the state of an OutlierRule with a list of numbers \"",
              key, "\", got ", state.substr(0, 100), "; leave the rule out of the load");
  return json[key].get<std::vector<double>>();
}

}  // namespace

OutlierRule::OutlierRule(double sigmas, int64_t window) : sigmas_(sigmas), window_(window) {
  TORCH_CHECK(sigmas > 0, "OutlierRule: expected sigmas above 0, got ", sigmas);
  TORCH_CHECK(window >= 2, "OutlierRule: expected a window of at least 2 steps, got ", window);
}

at::Tensor OutlierRule::judge(Window& window, const at::Tensor& value) const {
  const auto options = value.options().dtype(at::kDouble);
  if (!window.values.defined()) {
    window.values = at::zeros({window_}, options);
    window.known = at::zeros({}, options);
  }
  if (window.values.device() != value.device()) {  // after set_state()
    window.values = window.values.to(value.device());
    window.known = window.known.to(value.device());
  }
  const at::Tensor& known = window.known;
  const at::Tensor mean = window.values.sum() / known;
  const at::Tensor there = at::arange(window_, options) >= window_ - known;
  const at::Tensor square = at::where(there, window.values - mean, 0.0).square().sum();
  const at::Tensor limit = mean + sigmas_ * (square / (known - 1)).sqrt();
  const int64_t needed = std::min(window_, std::max<int64_t>(20, window_ / 2));
  const at::Tensor outlier = (known >= static_cast<double>(needed)).logical_and(value > limit);
  // In place, so that a captured CUDA graph goes on with the same memory.
  const at::Tensor finite = at::isfinite(value);
  const at::Tensor moved = at::cat({window.values.narrow(0, 1, window_ - 1), value.reshape({1})});
  window.values.copy_(at::where(finite, moved, window.values));
  window.known.add_(finite).clamp_max_(static_cast<double>(window_));
  return outlier;
}

at::Tensor OutlierRule::leaves_out(const at::Tensor& norm) {
  at::Tensor outlier = judge(norms_, norm);
  const at::Tensor loss = std::exchange(loss_, at::Tensor());
  if (!loss.defined()) return outlier;
  TORCH_CHECK(loss.numel() == 1, "OutlierRule::set_loss: expected one element, got shape ",
              loss.sizes());
  const at::Tensor value = loss.detach().reshape({}).to(norm.device(), at::kDouble);
  return outlier.logical_or(judge(losses_, value));
}

std::string OutlierRule::state() const {
  return json_text(nlohmann::ordered_json{{"norms", known_values(norms_.values, norms_.known)},
                                          {"losses", known_values(losses_.values, losses_.known)}});
}

void OutlierRule::set_state(const std::string& state) {
  const auto window_of = [&](const char* key) {
    const std::vector<double> values = parse(state, key);
    const auto count = std::min(window_, static_cast<int64_t>(values.size()));
    Window window{at::zeros({window_}, at::kDouble), at::zeros({}, at::kDouble)};
    std::copy(values.end() - count, values.end(),
              window.values.mutable_data_ptr<double>() + window_ - count);
    window.known.fill_(static_cast<double>(count));
    return window;
  };
  Window norms = window_of("norms"), losses = window_of("losses");
  norms_ = std::move(norms);
  losses_ = std::move(losses);
  loss_ = at::Tensor();  // of a step that was not made
}

}  // namespace zero
