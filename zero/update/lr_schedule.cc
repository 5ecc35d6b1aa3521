// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/lr_schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>

#include "zero/base/json_text.h"

namespace zero {
namespace {

// Learning rates of one formula differ by less, whatever computes them.
constexpr double kTolerance = 1e-9;

void check_steps(const char* what, int64_t steps, int64_t least) {
  TORCH_CHECK(steps >= least, what, ": expected at least ", least, " steps, got ", steps);
}

void check_factor(const char* what, double factor) {
  TORCH_CHECK(std::isfinite(factor) && factor >= 0.0, what,
              ": expected a factor of at least 0, got ", factor);
}

// How much of `steps` is done, from 0 to 1.
double progress(int64_t step, int64_t steps) {
  return std::min(static_cast<double>(step) / static_cast<double>(steps), 1.0);
}

struct SavedStep {
  int64_t step = 0;
  std::vector<double> rates;
};

SavedStep parse(const std::string& state) {
  try {
    const nlohmann::json saved = parse_json(state);
    TORCH_CHECK(saved.at("step").is_number_unsigned(), "a step below 0");
    SavedStep result{saved.at("step").get<int64_t>(), {}};
    for (const auto& rate : saved.at("learning_rates")) {
      // A rate that is not finite, such as that of a power behind its end, is null in JSON.
      result.rates.push_back(rate.is_null() ? std::numeric_limits<double>::quiet_NaN()
                                            : rate.get<double>());
    }
    return result;
  } catch (const std::exception&) {
    TORCH_CHECK(false, "LrSchedule: expected what its state() returned, got ",
                state.substr(0, 100));
  }
}

bool close(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
    if (!std::isfinite(x) || !std::isfinite(y)) return std::isfinite(x) == std::isfinite(y);
    return std::abs(x - y) <= kTolerance * std::max(std::abs(x), std::abs(y));
  });
}

}  // namespace

LrFactor constant_lr(double factor) {
  check_factor("constant_lr", factor);
  return [=](int64_t) { return factor; };
}

LrFactor step_decay(int64_t step_size, double gamma) {
  check_steps("step_decay", step_size, 1);
  check_factor("step_decay", gamma);
  return [=](int64_t step) { return std::pow(gamma, static_cast<double>(step / step_size)); };
}

LrFactor linear_decay(int64_t steps, double final_factor) {
  check_steps("linear_decay", steps, 1);
  check_factor("linear_decay", final_factor);
  return [=](int64_t step) { return 1.0 + (final_factor - 1.0) * progress(step, steps); };
}

LrFactor cosine_decay(int64_t steps, double final_factor) {
  check_steps("cosine_decay", steps, 1);
  check_factor("cosine_decay", final_factor);
  return [=](int64_t step) {
    const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress(step, steps)));
    return final_factor + (1.0 - final_factor) * cosine;
  };
}

LrFactor linear_warmup(int64_t warmup_steps, LrFactor after) {
  check_steps("linear_warmup", warmup_steps, 0);
  TORCH_CHECK(after != nullptr, "linear_warmup: expected what follows, got an empty function");
  return [warmup_steps, after = std::move(after)](int64_t step) {
    if (step >= warmup_steps) return after(step - warmup_steps);
    return static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  };
}

LrSchedule::LrSchedule(torch::optim::Optimizer& optimizer, LrFactor factor)
    : LrSchedule(optimizer, std::vector<LrFactor>(optimizer.param_groups().size(), factor)) {
  of_all_ = std::move(factor);
}

LrSchedule::LrSchedule(torch::optim::Optimizer& optimizer, std::vector<LrFactor> factors)
    : optimizer_(optimizer), factors_(std::move(factors)) {
  const auto& groups = optimizer.param_groups();
  TORCH_CHECK(factors_.size() == groups.size(), "LrSchedule: expected a factor for each of ",
              groups.size(), " parameter groups, got ", factors_.size());
  for (const auto& group : groups) base_.push_back(group.options().get_lr());
  for (size_t g = 0; g < base_.size(); ++g) {
    TORCH_CHECK(factors_[g] != nullptr, "LrSchedule: expected a factor for parameter group ", g,
                ", got an empty function");
    TORCH_CHECK(std::isfinite(base_[g]), "LrSchedule: expected a finite learning rate in group ", g,
                ", got ", base_[g]);
  }
  set_step(0);
}

std::vector<double> LrSchedule::bases() const {
  const auto& groups = optimizer_.param_groups();
  std::vector<double> result = base_;
  if (of_all_ && result.size() < groups.size()) {
    // What has set other rates may have set those of the groups that are new, if these were there.
    std::vector<double> set, now;
    for (size_t g = 0; g < base_.size(); ++g) {
      set.push_back(base_[g] * of_all_(step_));
      now.push_back(groups[g].options().get_lr());
    }
    TORCH_CHECK(
        close(set, now), "LrSchedule: expected learning rates ", c10::ArrayRef<double>(set),
        " in the first ", set.size(), " parameter groups, as this schedule has set them, got ",
        c10::ArrayRef<double>(now),
        ": a load or the program has set others, before or after parameter group ", set.size(),
        " was added, whose base is not known then. Call set_step() right behind a load and before "
        "add_param_group(), or behind that and before a load; now set the first ones to ",
        c10::ArrayRef<double>(set), " again and each later one to its base, and call set_step()");
  }
  while (of_all_ && result.size() < groups.size()) {
    result.push_back(groups[result.size()].options().get_lr());
  }
  return result;
}

std::vector<double> LrSchedule::rates(int64_t step) const {
  std::vector<double> result = bases();
  for (size_t g = 0; g < result.size(); ++g) result[g] *= (of_all_ ? of_all_ : factors_[g])(step);
  return result;
}

void LrSchedule::set_step(int64_t step) {
  TORCH_CHECK(step >= 0, "LrSchedule: expected a step of at least 0, got ", step);
  auto& groups = optimizer_.param_groups();
  std::vector<double> base = bases();
  TORCH_CHECK(groups.size() == base.size(), "LrSchedule: expected the ", base.size(),
              " parameter groups of construction, got ", groups.size(),
              "; a schedule made with one factor for all groups goes on with those that are added");
  const std::vector<double> now = rates(step);
  base_ = std::move(base);
  for (size_t g = 0; g < groups.size(); ++g) groups[g].options().set_lr(now[g]);
  step_ = step;
}

std::string LrSchedule::state() const {
  return json_text(nlohmann::ordered_json{{"step", step_}, {"learning_rates", rates(step_)}});
}

void LrSchedule::set_state(const std::string& state) {
  const SavedStep saved = parse(state);
  const std::vector<double> here = rates(saved.step);
  TORCH_CHECK(close(saved.rates, here), "LrSchedule: expected learning rates ",
              c10::ArrayRef<double>(saved.rates), " in step ", saved.step,
              " as in the run that was saved, got ", c10::ArrayRef<double>(here),
              "; make the optimizer and the schedule with the same arguments, or leave the "
              "schedule out of the load and call set_step(",
              saved.step, ") to go on with another one");
  set_step(saved.step);
}

}  // namespace zero
