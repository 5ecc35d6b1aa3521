// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The adapter of each class by itself: names, options, state and the fused update.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/own_optimizer.h"
#include "tests/support/random_tensors.h"
#include "zero/adafactor.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/lamb.h"
#include "zero/lion.h"
#include "zero/muon.h"

namespace zero {
namespace {

using namespace torch::optim;
using Names = std::vector<std::string>;
using Values = std::vector<std::pair<std::string, double>>;

// One class, with options of which none is the default.
struct Kind {
  std::string test_name;
  std::string name;
  const OptimizerAdapter& (*adapter)();
  std::shared_ptr<OptimizerOptions> defaults;
  std::shared_ptr<OptimizerOptions> options;
  std::function<std::unique_ptr<Optimizer>(const at::Tensor&)> make;
  Values values;   // of `options`
  Names tensors;   // of a state that has them all
  Names required;  // by a step
  bool counts = true;
  bool fused = false;
  bool whole = false;                // it looks at whole parameters
  std::vector<int64_t> sizes = {7};  // of a parameter
};

template <typename Class, typename Options>
Kind kind(const std::string& test_name, const OptimizerAdapter& (*adapter)(), Options defaults,
          const Options& options) {
  Kind k;
  k.test_name = test_name;
  k.name = test_name;
  k.adapter = adapter;
  k.defaults = std::make_shared<Options>(defaults);
  k.options = std::make_shared<Options>(options);
  k.make = [options](const at::Tensor& p) {
    return std::make_unique<Class>(std::vector<at::Tensor>{p}, options);
  };
  return k;
}

template <typename Class, typename Options>
Kind adam_kind(const std::string& name, const OptimizerAdapter& (*adapter)()) {
  Options options(0.25);
  options.betas({0.8, 0.95}).eps(1e-5).weight_decay(0.125).amsgrad(true);
  Kind k = kind<Class>(name, adapter, Options(), options);
  k.values = {{"lr", 0.25},  {"beta1", 0.8},          {"beta2", 0.95},
              {"eps", 1e-5}, {"weight_decay", 0.125}, {"amsgrad", 1}};
  k.tensors = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  k.required = {"exp_avg", "exp_avg_sq", "step"};
  k.fused = true;
  return k;
}

Kind sgd_kind(const std::string& test_name, const SGDOptions& options, const Values& values) {
  Kind k = kind<SGD>(test_name, sgd_adapter, SGDOptions(1.0), options);
  k.name = "SGD";
  k.values = values;
  k.tensors = {"momentum_buffer"};
  k.counts = false;
  k.fused = true;
  return k;
}

std::vector<Kind> kinds() {
  std::vector<Kind> result;
  result.push_back(adam_kind<AdamW, AdamWOptions>("AdamW", adamw_adapter));
  result.push_back(adam_kind<Adam, AdamOptions>("Adam", adam_adapter));
  result.push_back(sgd_kind("SGD",
                            SGDOptions(0.25).momentum(0.5).dampening(0.125).weight_decay(0.0625),
                            {{"lr", 0.25},
                             {"momentum", 0.5},
                             {"dampening", 0.125},
                             {"weight_decay", 0.0625},
                             {"nesterov", 0}}));
  result.push_back(sgd_kind("SGDNesterov",
                            SGDOptions(0.25).momentum(0.5).weight_decay(0.0625).nesterov(true),
                            {{"lr", 0.25},
                             {"momentum", 0.5},
                             {"dampening", 0},
                             {"weight_decay", 0.0625},
                             {"nesterov", 1}}));
  Kind rmsprop = kind<RMSprop>(
      "RMSprop", rmsprop_adapter, RMSpropOptions(),
      RMSpropOptions(0.25).alpha(0.5).eps(1e-5).weight_decay(0.125).momentum(0.75).centered(true));
  rmsprop.values = {{"lr", 0.25},       {"alpha", 0.5}, {"eps", 1e-5}, {"weight_decay", 0.125},
                    {"momentum", 0.75}, {"centered", 1}};
  rmsprop.tensors = {"square_avg", "momentum_buffer", "grad_avg"};
  rmsprop.required = {"square_avg", "step"};
  result.push_back(std::move(rmsprop));
  Kind adagrad = kind<Adagrad>(
      "Adagrad", adagrad_adapter, AdagradOptions(),
      AdagradOptions(0.25).lr_decay(0.5).weight_decay(0.125).initial_accumulator_value(0.75).eps(
          1e-5));
  adagrad.values = {{"lr", 0.25},
                    {"lr_decay", 0.5},
                    {"weight_decay", 0.125},
                    {"initial_accumulator_value", 0.75},
                    {"eps", 1e-5}};
  adagrad.tensors = {"sum"};
  adagrad.required = {"sum", "step"};
  result.push_back(std::move(adagrad));
  Kind lion = kind<Lion>("Lion", lion_adapter, LionOptions(),
                         LionOptions(0.25).betas({0.8, 0.95}).weight_decay(0.125));
  lion.name = "zero::Lion";
  lion.values = {{"lr", 0.25}, {"beta1", 0.8}, {"beta2", 0.95}, {"weight_decay", 0.125}};
  lion.tensors = {"exp_avg"};
  lion.required = {"exp_avg"};
  lion.counts = false;
  lion.fused = true;
  result.push_back(std::move(lion));
  // TheDtypeOfProductsIsStoredAndAnExplicitOneIsKept has Muon's ns_dtype.
  Kind muon = kind<Muon>("Muon", muon_adapter, MuonOptions(),
                         MuonOptions(0.25)
                             .weight_decay(0.125)
                             .momentum(0.5)
                             .nesterov(false)
                             .ns_coefficients({2.0, -1.5, 0.5})
                             .eps(1e-5)
                             .ns_steps(4)
                             .adjust_lr_fn("match_rms_adamw")
                             .batched(false));
  muon.name = "zero::Muon";
  muon.values = {{"lr", 0.25},    {"weight_decay", 0.125}, {"momentum", 0.5}, {"nesterov", 0},
                 {"ns_a", 2},     {"ns_b", -1.5},          {"ns_c", 0.5},     {"eps", 1e-5},
                 {"ns_steps", 4}, {"match_rms_adamw", 1},  {"ns_fp32", 0},    {"ns_bf16", 0},
                 {"batched", 0}};
  muon.tensors = {"momentum_buffer"};
  muon.required = {"momentum_buffer"};
  muon.counts = false;
  muon.whole = true;
  muon.sizes = {7, 1};
  result.push_back(std::move(muon));
  Kind lamb = kind<Lamb>("Lamb", lamb_adapter, LambOptions(),
                         LambOptions(0.25)
                             .betas({0.8, 0.95})
                             .eps(1e-5)
                             .weight_decay(0.125)
                             .bias_correction(false)
                             .norm_bounds(std::make_tuple(0.5, 2.0))
                             .adapt(false));
  lamb.name = "zero::Lamb";
  lamb.values = {{"lr", 0.25},        {"beta1", 0.8},          {"beta2", 0.95},
                 {"eps", 1e-5},       {"weight_decay", 0.125}, {"bias_correction", 0},
                 {"least_norm", 0.5}, {"largest_norm", 2},     {"adapt", 0}};
  lamb.tensors = {"exp_avg", "exp_avg_sq"};
  lamb.required = {"exp_avg", "exp_avg_sq", "step"};
  lamb.whole = true;
  result.push_back(std::move(lamb));
  Kind adafactor = kind<Adafactor>("Adafactor", adafactor_adapter, AdafactorOptions(),
                                   AdafactorOptions(0.25)
                                       .beta2_decay(-0.5)
                                       .eps({1e-4, 0.01})
                                       .d(1.5)
                                       .weight_decay(0.125)
                                       .maximize(true));
  adafactor.name = "zero::Adafactor";
  adafactor.values = {{"lr", 0.25}, {"beta2_decay", -0.5},   {"eps1", 1e-4}, {"eps2", 0.01},
                      {"d", 1.5},   {"weight_decay", 0.125}, {"maximize", 1}};
  adafactor.tensors = {"variance"};
  adafactor.required = {"step"};
  adafactor.whole = true;
  result.push_back(std::move(adafactor));
  return result;
}

at::Tensor parameter(const std::vector<int64_t>& sizes = {7}) {
  return random_tensor(sizes, 3).requires_grad_();
}
at::Tensor gradient(int step) { return random_tensor({7}, 100 + static_cast<uint64_t>(step)); }

void steps(Optimizer& optimizer, at::Tensor p, int first, int last) {
  for (int step = first; step < last; ++step) {
    p.mutable_grad() = gradient(step).view(p.sizes());
    optimizer.step();
  }
}

Names names_of(const InnerState& state) {
  Names names;
  for (const auto& item : state.tensors) names.push_back(item.first);
  return names;
}

class AdapterTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Of, AdapterTest, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.test_name; });

TEST(AdaptersTest, EachIsTestedHere) {
  for (const OptimizerAdapter* adapter : registered_adapters()) {
    const auto all = kinds();
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [&](const Kind& k) {
      return &k.adapter() == adapter;
    })) << adapter->name();
  }
}

TEST_P(AdapterTest, IsFoundForItsClassAlone) {
  const Kind& k = GetParam();
  const auto optimizer = k.make(parameter(k.sizes));
  const OptimizerAdapter& adapter = k.adapter();
  EXPECT_EQ(adapter.name(), k.name);
  EXPECT_EQ(optimizer_name(*optimizer), k.name);
  EXPECT_EQ(&adapter_of(*optimizer), &adapter);
  EXPECT_EQ(&adapter_of(*k.options), &adapter);
  EXPECT_EQ(is_known(*optimizer), true);
  for (const OptimizerAdapter* other : registered_adapters()) {
    EXPECT_EQ(other->is_class_of(*optimizer), other == &adapter);
    EXPECT_EQ(other->is_class_of(*k.options), other == &adapter);
  }
}

TEST_P(AdapterTest, OptionsComeBackByName) {
  const Kind& k = GetParam();
  EXPECT_EQ(k.adapter().option_values(*k.options), k.values);
  const auto fresh = k.defaults->clone();
  EXPECT_FALSE(k.adapter().equal_options(*fresh, *k.options));
  k.adapter().set_option_values(*fresh, k.values);
  EXPECT_TRUE(k.adapter().equal_options(*fresh, *k.options));
  EXPECT_EQ(k.adapter().option_values(*fresh), k.values);
  EXPECT_EQ(options_text(*fresh).find("lr 0.25 "), 0) << options_text(*fresh);
}

TEST_P(AdapterTest, EachOptionIsSetByItsOwnNameAndTheOthersStay) {
  const Kind& k = GetParam();
  for (size_t i = 0; i < k.values.size(); ++i) {
    SCOPED_TRACE(k.values[i].first);
    const auto changed = k.options->clone();
    Values expected = k.values;
    // Truth values among them.
    expected[i].second = expected[i].second == 0.0 ? 1.0 : 0.0;
    k.adapter().set_option_values(*changed, {expected[i], {"no option of this class", 5.0}});
    EXPECT_EQ(k.adapter().option_values(*changed), expected);
    EXPECT_FALSE(k.adapter().equal_options(*changed, *k.options));
    EXPECT_NE(options_text(*changed), options_text(*k.options));
  }
}

TEST_P(AdapterTest, StateHasTheNamesOfItsAccessorsAndGoesOnInEveryBit) {
  const Kind& k = GetParam();
  const at::Tensor p = parameter(k.sizes);
  const auto optimizer = k.make(p);
  steps(*optimizer, p, 0, 3);
  const auto state = read_inner_state(*optimizer, 0, p);
  ASSERT_TRUE(state.has_value());
  EXPECT_EQ(names_of(*state), k.tensors);
  Names visited;
  k.adapter().visit_tensors(*optimizer->state().begin()->second,
                            [&](const char* name, const at::Tensor& tensor) {
                              visited.push_back(name);
                              EXPECT_EQ(tensor.nbytes(), 28);
                            });
  EXPECT_EQ(visited, k.tensors);
  InnerState copy = *state;
  for (auto& [name, tensor] : copy.tensors) tensor = tensor.clone();

  const at::Tensor other = p.detach().clone().requires_grad_();
  const auto resumed = k.make(other);
  resumed->state()[other.unsafeGetTensorImpl()] =
      k.adapter().make_state(*resumed, 0, other, copy, Moments::kFloat32);
  steps(*optimizer, p, 3, 6);
  steps(*resumed, other, 3, 6);
  EXPECT_TRUE(at::equal(p, other));
  const auto again = read_inner_state(*resumed, 0, other);
  const auto whole = read_inner_state(*optimizer, 0, p);
  ASSERT_EQ(names_of(*again), names_of(*whole));
  for (size_t i = 0; i < whole->tensors.size(); ++i) {
    EXPECT_TRUE(at::equal(again->tensors[i].second, whole->tensors[i].second));
  }
  ASSERT_EQ(again->values.size(), k.counts ? 1U : 0U);
  if (k.counts) {
    EXPECT_EQ(again->values[0].first, "step");
    EXPECT_EQ(again->values[0].second.item<int64_t>(), 6);
  }
  EXPECT_EQ(k.adapter().required_state(), k.required);
}

TEST_P(AdapterTest, StateThatTheClassDoesNotHaveIsRefused) {
  const Kind& k = GetParam();
  const at::Tensor p = parameter(k.sizes);
  const auto optimizer = k.make(p);
  const auto refused = [&](const InnerState& state) {
    return error_of([&] { k.adapter().make_state(*optimizer, 0, p, state, Moments::kFloat32); });
  };
  expect_words(refused({{{"hessian", at::ones({7})}}, {}}),
               {"expected tensors that " + k.name + " has", "hessian"});
  expect_words(refused({{{k.tensors[0], at::ones({7}, at::kDouble)}}, {}}),
               {k.tensors[0] + " of " + k.name, "expected Float, got Double"});
  expect_words(refused({{}, {{"step", at::ones({1})}}}), {"expected step, of Long"});
  expect_words(refused({{}, {{"epoch", at::ones({1}, at::kLong)}}}), {"got epoch"});
  EXPECT_EQ(read_inner_state(*optimizer, 0, at::ones({2})), std::nullopt);
  optimizer->state()[p.unsafeGetTensorImpl()] = std::make_unique<OwnState>();
  expect_words(error_of([&] { read_inner_state(*optimizer, 0, p); }),
               {"state of " + k.name, "the class of state that it makes"});
}

TEST_P(AdapterTest, OnlyAdagradBeginsWithStateAndUsedStateIsRefused) {
  const Kind& k = GetParam();
  const at::Tensor p = parameter(k.sizes), segment = at::zeros({3});
  const auto optimizer = k.make(p);
  check_inner_optimizer(*optimizer, false, {k.whole});
  make_initial_state(*optimizer, 0, segment);
  const auto state = read_inner_state(*optimizer, 0, segment);
  EXPECT_EQ(state.has_value(), k.name == "Adagrad");
  if (state) {
    EXPECT_TRUE(at::equal(state->tensors.at(0).second, at::full({3}, 0.75)));
    EXPECT_EQ(state->values.at(0).second.item<int64_t>(), 0);
  }
  steps(*optimizer, p, 0, 1);
  expect_words(error_of([&] { check_inner_optimizer(*optimizer, false, {k.whole}); }),
               {"expected no state yet"});
}

TEST_P(AdapterTest, TheFusedUpdateFollowsTheStepOfTheClassAndKeepsItsState) {
  const Kind& k = GetParam();
  const at::Tensor p = parameter(k.sizes), master = p.detach().clone();
  const auto optimizer = k.make(p), other = k.make(master);
  const FusedUpdate* fused = adapter_of(*other).fused();
  ASSERT_EQ(fused != nullptr, k.fused);
  if (fused == nullptr) return;
  EXPECT_EQ(fused->update_count(*other, master), 0);
  EXPECT_TRUE(fused->prepare_state(*other, 0, master, Moments::kFloat32));
  EXPECT_FALSE(fused->prepare_state(*other, 0, master, Moments::kFloat32));
  other->state().clear();
  const float one = 1;
  const at::Tensor working = at::zeros({7});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor g = gradient(step);
    fused->update(*other, 0, {{&master, g.const_data_ptr<float>(), working.mutable_data_ptr()}},
                  {&one, nullptr}, at::kFloat, {});
  }
  steps(*optimizer, p, 0, 3);
  EXPECT_TRUE(at::allclose(p, master, 1e-5, 1e-6)) << p << master;
  EXPECT_TRUE(at::equal(working, master));
  const auto expected = read_inner_state(*optimizer, 0, p),
             got = read_inner_state(*other, 0, master);
  ASSERT_EQ(names_of(*got), names_of(*expected));
  for (size_t i = 0; i < got->tensors.size(); ++i) {
    EXPECT_TRUE(at::allclose(got->tensors[i].second, expected->tensors[i].second, 1e-5, 1e-6));
  }
  EXPECT_EQ(fused->update_count(*other, master), k.counts ? 3 : 1);
  fused->set_update_count(*other, master, 9);
  EXPECT_EQ(fused->update_count(*other, master), k.counts ? 9 : 1);
}

// Checkpoints of earlier versions have no ns_bf16.
TEST(MuonOptionsTest, TheDtypeOfProductsIsStoredAndAnExplicitOneIsKept) {
  const auto loaded = [](MuonOptions from, MuonOptions into, bool old) {
    auto values = muon_adapter().option_values(from);
    if (old) std::erase_if(values, [](const auto& value) { return value.first == "ns_bf16"; });
    muon_adapter().set_option_values(into, values);
    return into.ns_dtype();
  };
  const MuonOptions none, bf16 = MuonOptions().ns_dtype(at::kBFloat16),
                          fp32 = MuonOptions().ns_dtype(at::kFloat);
  for (const MuonOptions& from : {none, bf16, fp32}) {
    for (const MuonOptions& into : {none, bf16, fp32}) {
      EXPECT_EQ(loaded(from, into, false), from.ns_dtype());
    }
    EXPECT_EQ(loaded(fp32, from, true), at::kFloat);
  }
  EXPECT_EQ(loaded(none, none, true), std::nullopt);
  EXPECT_EQ(loaded(none, fp32, true), std::nullopt);
  EXPECT_EQ(loaded(none, bf16, true), at::kBFloat16);
}

// ---- The classes that are not in the registry ----

std::unique_ptr<Optimizer> own(const at::Tensor& p) {
  return std::make_unique<OwnOptimizer>(std::vector<OptimizerParamGroup>{OptimizerParamGroup({p})},
                                        OwnOptions(0.25));
}

TEST(SerializedAdapterTest, AClassOfTheUsersOwnHasItsTypeAsNameAndNeedsPermission) {
  const auto optimizer = own(parameter());
  EXPECT_FALSE(is_known(*optimizer));
  EXPECT_EQ(optimizer_name(*optimizer), "zero::OwnOptimizer");
  EXPECT_EQ(adapter_of(*optimizer).fused(), nullptr);
  EXPECT_EQ(adapter_of(*optimizer).required_state(), Names{});
  check_inner_optimizer(*optimizer, true, {false});
  expect_words(error_of([&] { check_inner_optimizer(*optimizer, false, {false}); }),
               {"expected AdamW, Adam, SGD, RMSprop or Adagrad of torch::optim, or zero::Lion,",
                "got zero::OwnOptimizer", "elementwise(true)"});
}

// No learning rate, and nothing that serialize() writes.
struct NoOptions : torch::optim::OptimizerCloneableOptions<NoOptions> {};

TEST(SerializedAdapterTest, AStepLooksAtTheLearningRateAlone) {
  const OwnOptions options(0.25), other = OwnOptions(0.25).warmup(7), faster(0.5);
  EXPECT_EQ(options_text(options),
            "betas.0 0.9 betas.1 0.99 decays 1 lr 0.25 warmup 3 weight_decay 0");
  EXPECT_EQ(step_options_text(options), "lr 0.25");
  EXPECT_TRUE(adapter_of(options).equal_options(options, other));
  EXPECT_FALSE(adapter_of(options).equal_options(options, faster));
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(step_options_text(NoOptions()), "");
    EXPECT_EQ(options_text(NoOptions()), "");
    EXPECT_TRUE(adapter_of(NoOptions()).equal_options(NoOptions(), NoOptions()));
  }
}

TEST(SerializedAdapterTest, StateOfAClassOfTheUsersOwnIsUsedState) {
  const at::Tensor p = parameter();
  const auto optimizer = own(p);
  steps(*optimizer, p, 0, 1);
  expect_words(error_of([&] { check_inner_optimizer(*optimizer, true, {false}); }),
               {"expected no state yet", "Make a new one"});
}

class OwnAdagrad : public torch::optim::Adagrad {
 public:
  using Adagrad::Adagrad;
};

TEST(SerializedAdapterTest, AClassWhoseConstructorMakesStateIsRefused) {
  const OwnAdagrad optimizer(std::vector<at::Tensor>{parameter()});
  expect_words(error_of([&] { check_inner_optimizer(optimizer, true, {false}); }),
               {"expected no state yet", "OwnAdagrad", "its constructor makes state"});
}

TEST(SerializedAdapterTest, StateAndOptionsGoOnInEveryBit) {
  const at::Tensor p = parameter();
  const auto optimizer = own(p);
  steps(*optimizer, p, 0, 3);
  const at::Tensor other = p.detach().clone().requires_grad_();
  const auto resumed = own(other);
  OptimizerOptions& options = resumed->param_groups()[0].options();
  options.set_lr(7);
  const OptimizerAdapter& adapter = adapter_of(*resumed);
  adapter.set_option_values(options, adapter.option_values(optimizer->param_groups()[0].options()));
  EXPECT_EQ(options.get_lr(), 0.25);
  resumed->state()[other.unsafeGetTensorImpl()] = adapter.make_state(
      *resumed, 0, other, *read_inner_state(*optimizer, 0, p), Moments::kFloat32);
  EXPECT_EQ(resumed->param_groups()[0].params().size(), 1);
  steps(*optimizer, p, 3, 6);
  steps(*resumed, other, 3, 6);
  EXPECT_TRUE(at::equal(p, other));
}

// They are refused with elementwise(true) too, since it is known that they are not.
TEST(InnerOptimizerTest, ClassesThatNeedWholeParametersAreRefusedOnCutOnes) {
  const at::Tensor matrix = random_tensor({3, 3}, 1).requires_grad_();
  const std::vector<at::Tensor> params = {matrix};
  for (const bool elementwise : {false, true}) {
    const auto refused = [&](const Optimizer& optimizer, const std::string& name) {
      expect_words(error_of([&] { check_inner_optimizer(optimizer, elementwise, {false}); }),
                   {"treats every element by itself", "got " + name + ",", "whole parameters",
                    "Leave out the layout of its parameter groups"});
      check_inner_optimizer(optimizer, elementwise, {true});
    };
    refused(Muon(params), "zero::Muon");
    refused(Lamb(params), "zero::Lamb");
    refused(Adafactor(params), "zero::Adafactor");
  }
}

TEST(InnerOptimizerTest, LbfgsIsRefusedAndTheErrorNamesTheClassesThatAreNot) {
  LBFGS optimizer(std::vector<at::Tensor>{parameter()}, LBFGSOptions());
  expect_words(error_of([&] { check_inner_optimizer(optimizer, true, {false}); }),
               {"got LBFGS", "Use AdamW, Adam, SGD, RMSprop or Adagrad, or zero::Lion"});
}

}  // namespace
}  // namespace zero
