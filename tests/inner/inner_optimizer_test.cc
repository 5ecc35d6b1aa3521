// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Options and state of each of torch's classes, by name and back.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "zero/inner/classes.h"
#include "zero/inner/state.h"

namespace zero {
namespace {

using namespace torch::optim;
using Values = std::vector<std::pair<std::string, double>>;

// One class, with options of which none is the default.
struct Kind {
  std::string name;
  std::unique_ptr<OptimizerOptions> options;
  std::function<std::unique_ptr<Optimizer>(const at::Tensor&)> make;
};

template <typename Class, typename Options>
Kind kind(const std::string& name, const Options& options) {
  const OptimizerOptions& base = options;
  return {name, base.clone(), [options](const at::Tensor& p) {
            return std::make_unique<Class>(std::vector<at::Tensor>{p}, options);
          }};
}

std::vector<Kind> kinds() {
  const auto adam = [](auto options) {
    options.betas({0.8, 0.95}).eps(1e-5).weight_decay(0.125).amsgrad(true);
    return options;
  };
  std::vector<Kind> result;
  result.push_back(kind<AdamW>("AdamW", adam(AdamWOptions(0.25))));
  result.push_back(kind<Adam>("Adam", adam(AdamOptions(0.25))));
  result.push_back(
      kind<SGD>("SGD", SGDOptions(0.25).momentum(0.5).dampening(0.125).weight_decay(0.0625)));
  result.push_back(
      kind<SGD>("SGD", SGDOptions(0.25).momentum(0.5).weight_decay(0.0625).nesterov(true)));
  result.push_back(kind<RMSprop>(
      "RMSprop",
      RMSpropOptions(0.25).alpha(0.5).eps(1e-5).weight_decay(0.125).momentum(0.75).centered(true)));
  result.push_back(kind<Adagrad>(
      "Adagrad",
      AdagradOptions(0.25).lr_decay(0.5).weight_decay(0.125).initial_accumulator_value(0.75).eps(
          1e-5)));
  return result;
}

at::Tensor parameter() { return numbers({7}, 3).requires_grad_(); }

// A new optimizer's options, of the class's defaults.
std::unique_ptr<OptimizerOptions> defaults(const std::string& name) {
  if (name == "AdamW") return std::make_unique<AdamWOptions>();
  if (name == "Adam") return std::make_unique<AdamOptions>();
  if (name == "SGD") return std::make_unique<SGDOptions>(1.0);
  if (name == "RMSprop") return std::make_unique<RMSpropOptions>();
  return std::make_unique<AdagradOptions>();
}

TEST(InnerOptimizerTest, OptionsOfEveryClassComeBackByName) {
  for (const Kind& k : kinds()) {
    SCOPED_TRACE(k.name);
    const auto fresh = defaults(k.name);
    EXPECT_FALSE(equal_options(*fresh, *k.options));
    set_option_values(*fresh, stored_option_values(*k.options));
    EXPECT_TRUE(equal_options(*fresh, *k.options));
    EXPECT_EQ(option_values(*fresh), option_values(*k.options));
    EXPECT_EQ(options_text(*fresh).find("lr 0.25 "), 0) << options_text(*fresh);
  }
}

TEST(InnerOptimizerTest, EachOptionIsSetByItsOwnNameAndTheOthersStay) {
  for (const Kind& k : kinds()) {
    const Values before = option_values(*k.options);
    for (size_t i = 0; i < before.size(); ++i) {
      SCOPED_TRACE(k.name + " " + before[i].first);
      const auto changed = k.options->clone();
      Values expected = before;
      // Truth values among them.
      expected[i].second = before[i].second == 0.0 ? 1.0 : 0.0;
      set_option_values(*changed, {expected[i], {"no option of this class", 5.0}});
      EXPECT_EQ(option_values(*changed), expected);
      EXPECT_FALSE(equal_options(*changed, *k.options));
    }
  }
}

void steps(Optimizer& optimizer, at::Tensor p, int first, int last) {
  for (int step = first; step < last; ++step) {
    p.mutable_grad() = numbers({7}, 100 + static_cast<uint64_t>(step));
    optimizer.step();
  }
}

TEST(InnerOptimizerTest, StateOfEveryClassGoesOnInEveryBit) {
  for (const Kind& k : kinds()) {
    SCOPED_TRACE(k.name);
    const at::Tensor p = parameter();
    const auto optimizer = k.make(p);
    EXPECT_EQ(optimizer_name(*optimizer), k.name);
    steps(*optimizer, p, 0, 3);
    const auto state = read_inner_state(*optimizer, p);
    ASSERT_TRUE(state.has_value());
    InnerState copy = *state;
    for (auto& [name, tensor] : copy.tensors) tensor = tensor.clone();

    const at::Tensor other = p.detach().clone().requires_grad_();
    const auto resumed = k.make(other);
    resumed->state()[other.unsafeGetTensorImpl()] = make_inner_state(*resumed, 0, other, copy);
    steps(*optimizer, p, 3, 6);
    steps(*resumed, other, 3, 6);
    EXPECT_TRUE(at::equal(p, other));
    const auto again = read_inner_state(*resumed, other);
    const auto whole = read_inner_state(*optimizer, p);
    ASSERT_EQ(again->tensors.size(), whole->tensors.size());
    for (size_t i = 0; i < whole->tensors.size(); ++i) {
      EXPECT_EQ(again->tensors[i].first, whole->tensors[i].first);
      EXPECT_TRUE(at::equal(again->tensors[i].second, whole->tensors[i].second));
    }
    ASSERT_EQ(again->values.size(), k.name == "SGD" ? 0U : 1U);
    if (k.name != "SGD") {
      EXPECT_EQ(again->values[0].second.item<int64_t>(), 6);
    }
  }
}

TEST(InnerOptimizerTest, StateThatAClassDoesNotHaveIsRefused) {
  for (const Kind& k : kinds()) {
    const at::Tensor p = parameter();
    const auto optimizer = k.make(p);
    const auto refused = [&](const InnerState& state) {
      return error_of([&] { make_inner_state(*optimizer, 0, p, state); });
    };
    expect_words(refused({{{"hessian", at::ones({7})}}, {}}),
                 {"expected tensors that " + k.name + " has", "hessian"});
    expect_words(refused({{{"exp_avg", at::ones({7}, at::kDouble)}}, {}}),
                 {"exp_avg of " + k.name, "expected Float, got Double"});
    expect_words(refused({{}, {{"step", at::ones({1})}}}), {"expected step, of Long"});
    expect_words(refused({{}, {{"epoch", at::ones({1}, at::kLong)}}}), {"got epoch"});
    EXPECT_EQ(read_inner_state(*optimizer, at::ones({2})), std::nullopt);
  }
}

TEST(InnerOptimizerTest, OnlyAdagradBeginsWithState) {
  for (const Kind& k : kinds()) {
    const at::Tensor p = parameter(), segment = at::zeros({3});
    const auto optimizer = k.make(p);
    check_inner_optimizer(*optimizer, false);
    make_initial_state(*optimizer, 0, segment);
    const auto state = read_inner_state(*optimizer, segment);
    EXPECT_EQ(state.has_value(), k.name == "Adagrad");
    if (!state) continue;
    EXPECT_TRUE(at::equal(state->tensors.at(0).second, at::full({3}, 0.75)));
    EXPECT_EQ(state->values.at(0).second.item<int64_t>(), 0);
  }
}

}  // namespace
}  // namespace zero
