// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/combined_optimizer.h without a ZeroOptimizer, beside its parts on their own.
#include "zero/combined_optimizer.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <sstream>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "zero/inner_optimizers/classes.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/muon.h"

namespace zero {
namespace {

using torch::optim::Adagrad;
using torch::optim::AdagradOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using Optimizers = std::vector<std::unique_ptr<torch::optim::Optimizer>>;

struct Model {
  std::vector<at::Tensor> matrices = {random_tensor({5, 7}, 1), random_tensor({4, 4}, 2)};
  std::vector<at::Tensor> vectors = {random_tensor({9}, 3)};
  std::vector<at::Tensor> others = {random_tensor({3, 2}, 4), random_tensor({1}, 5)};

  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> result = matrices;
    result.insert(result.end(), vectors.begin(), vectors.end());
    result.insert(result.end(), others.begin(), others.end());
    return result;
  }
  Optimizers parts() const {
    Optimizers result;
    result.push_back(std::make_unique<Muon>(matrices, MuonOptions(0.02)));
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(vectors);
    groups.emplace_back(std::vector<at::Tensor>{others[0]});
    result.push_back(std::make_unique<AdamW>(groups, AdamWOptions(0.01)));
    result.push_back(std::make_unique<Adagrad>(std::vector<at::Tensor>{others[1]},
                                               AdagradOptions(0.1).initial_accumulator_value(0.5)));
    return result;
  }
  // One parameter has no gradient in every third step.
  void set_gradients(int step) const {
    const auto tensors = all();
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].mutable_grad() = (step + i) % 3 == 0
                                      ? at::Tensor()
                                      : random_tensor(tensors[i].sizes().vec(), 100 * step + i);
    }
  }
};

void expect_equal(const Model& a, const Model& b) {
  const auto left = a.all(), right = b.all();
  for (size_t i = 0; i < left.size(); ++i) EXPECT_TRUE(left[i].equal(right[i])) << i;
}

TEST(CombinedOptimizerTest, StepsAsItsPartsDo) {
  const Model model, plain;
  CombinedOptimizer combined(model.parts());
  const Optimizers parts = plain.parts();
  ASSERT_EQ(combined.param_groups().size(), 4U);
  EXPECT_EQ(combined.parts(), 3);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {  // options are those of the groups at the time of the step
      combined.param_groups()[2].options().set_lr(0.5);
      parts[1]->param_groups()[1].options().set_lr(0.5);
    }
    plain.set_gradients(step);
    const at::Tensor loss = combined.step([&] {
      EXPECT_TRUE(at::GradMode::is_enabled());
      model.set_gradients(step);
      return at::full({}, step);
    });
    EXPECT_EQ(loss.item<int>(), step);
    for (const auto& part : parts) part->step();
    expect_equal(model, plain);
  }
  EXPECT_EQ(combined.state().size(), 5U);
}

TEST(CombinedOptimizerTest, SavedAndLoadedItGoesOnInEveryBit) {
  const Model model, other;
  CombinedOptimizer combined(model.parts()), resumed(other.parts());
  for (int step = 0; step < 3; ++step) {
    model.set_gradients(step);
    combined.step();
  }
  combined.param_groups()[0].options().set_lr(0.3);
  std::stringstream file;
  torch::save(combined, file);
  torch::load(resumed, file);
  EXPECT_EQ(resumed.param_groups()[0].options().get_lr(), 0.3);
  const auto from = model.all(), to = other.all();
  for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  for (int step = 3; step < 6; ++step) {
    model.set_gradients(step);
    other.set_gradients(step);
    combined.step();
    resumed.step();
    expect_equal(model, other);
  }
}

TEST(CombinedOptimizerTest, EachGroupHasTheClassOfItsPart) {
  const Model model;
  const CombinedOptimizer combined(model.parts());
  EXPECT_EQ(optimizer_name(combined), "zero::Muon + AdamW + Adagrad");
  const std::vector<std::string> names = {"zero::Muon", "AdamW", "AdamW", "Adagrad"};
  for (int64_t g = 0; g < 4; ++g) EXPECT_EQ(adapter_of(combined, g).name(), names[g]);
  EXPECT_EQ(needs_whole_parameters(combined), (std::vector<bool>{true, false, false, false}));
}

// As its constructor's, whatever a group has.
TEST(CombinedOptimizerTest, StateOfAdagradBeginsWithTheDefaultsOfItsPart) {
  const Model model;
  CombinedOptimizer combined(model.parts());
  static_cast<AdagradOptions&>(combined.param_groups()[3].options())
      .initial_accumulator_value(0.75);
  const at::Tensor segment = at::zeros({3});
  make_initial_state(combined, 3, segment);
  const auto state = read_inner_state(combined, 3, segment);
  ASSERT_TRUE(state.has_value());
  EXPECT_TRUE(at::equal(state->tensors.at(0).second, at::full({3}, 0.5)));
}

TEST(CombinedOptimizerTest, APartThatThrowsLosesNoState) {
  const Model model;
  CombinedOptimizer combined(model.parts());
  for (int step = 1; step < 4; ++step) {
    model.set_gradients(step);
    combined.step();
  }
  const size_t states = combined.state().size();
  model.matrices[0].mutable_grad() = model.matrices[0].to_sparse();
  expect_words(error_of([&] { combined.step(); }), {"Muon", "sparse"});
  EXPECT_EQ(combined.state().size(), states);
  EXPECT_EQ(combined.param_groups()[0].params().size(), 2U);
}

TEST(CombinedOptimizerTest, AGroupThatNoPartStepsIsRefused) {
  const Model model;
  CombinedOptimizer combined(model.parts());
  torch::optim::Optimizer& base = combined;
  base.add_param_group(torch::optim::OptimizerParamGroup({random_tensor({3, 3}, 9)}));
  const std::vector<std::string> words = {"the 4 parameter groups of its parts, got 5"};
  expect_words(error_of([&] { combined.step(); }), words);
  std::stringstream file;
  expect_words(error_of([&] { torch::save(combined, file); }), words);
}

TEST(CombinedOptimizerTest, PartsThatCannotBeCombinedAreRefused) {
  const Model model;
  const auto refused = [&](auto make) {
    return error_of([&] {
      Optimizers parts;
      make(parts);
      CombinedOptimizer combined(std::move(parts));
    });
  };
  expect_words(refused([](Optimizers&) {}), {"at least one optimizer"});
  expect_words(refused([](Optimizers& parts) { parts.push_back(nullptr); }), {"null pointer"});
  expect_words(refused([&](Optimizers& parts) {
                 parts.push_back(std::make_unique<AdamW>(model.vectors, AdamWOptions(0.1)));
                 parts.push_back(std::make_unique<AdamW>(model.vectors, AdamWOptions(0.1)));
               }),
               {"each parameter in one part"});
  expect_words(refused([&](Optimizers& parts) {
                 parts.push_back(std::make_unique<CombinedOptimizer>(model.parts()));
               }),
               {"give its parts instead"});
}

}  // namespace
}  // namespace zero
