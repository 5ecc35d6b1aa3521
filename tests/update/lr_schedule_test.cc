// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Learning-rate schedules give the values of torch's formulas and, from a saved state, the bits of
// a schedule that never stopped.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "zero/lr_schedule.h"

namespace zero {
namespace {

// One parameter in each group.
torch::optim::SGD optimizer_with(const std::vector<double>& rates) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t g = 0; g < rates.size(); ++g) groups.emplace_back(std::vector{at::ones({1})});
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1.0));
  for (size_t g = 0; g < rates.size(); ++g) optimizer.param_groups()[g].options().set_lr(rates[g]);
  return optimizer;
}

double rate(const torch::optim::Optimizer& optimizer, size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}

// The learning rates of the first steps, from a base of 1.
std::vector<double> rates_of(const LrFactor& factor, size_t steps) {
  torch::optim::SGD optimizer = optimizer_with({1.0});
  LrSchedule schedule(optimizer, factor);
  std::vector<double> result;
  for (size_t step = 0; step < steps; ++step) {
    result.push_back(rate(optimizer));
    schedule.step();
  }
  return result;
}

struct Reference {
  const char* name;
  const char* python;  // of torch.optim.lr_scheduler 2.11, with a base learning rate of 1
  LrFactor factor;
  std::vector<double> rates;
};

// What `python` printed: the learning rate before each step.
std::vector<Reference> references() {
  const std::vector<double> cosine = {
      1.0,  0.9657457896300791, 0.8681980515339464, 0.7222075445642905,
      0.55, 0.3777924554357097, 0.2318019484660537, 0.134254210369921,
      0.1};
  const std::vector<double> linear = {1.0,
                                      0.9,
                                      0.7999999999999999,
                                      0.7,
                                      0.6,
                                      0.49999999999999994,
                                      0.39999999999999997,
                                      0.3,
                                      0.19999999999999996,
                                      0.19999999999999996,
                                      0.19999999999999996};
  const std::vector<double> decay = {1.0,  1.0,  1.0,  0.3,   0.3,   0.3,
                                     0.09, 0.09, 0.09, 0.027, 0.027, 0.027};
  const auto after_warmup = [](const std::vector<double>& rates) {
    std::vector<double> result = {0.25, 0.5, 0.75, 1.0};
    result.insert(result.end(), rates.begin(), rates.end());
    return result;
  };
  // SequentialLR([LinearLR(start_factor=1 / 4, total_iters=3), ...], milestones=[4])
  return {
      {"constant", "ConstantLR(factor=0.25, total_iters=1000)", constant_lr(0.25),
       std::vector<double>(4, 0.25)},
      {"step", "StepLR(step_size=3, gamma=0.3)", step_decay(3, 0.3), decay},
      {"linear", "LinearLR(start_factor=1, end_factor=0.2, total_iters=8)", linear_decay(8, 0.2),
       linear},
      {"cosine", "CosineAnnealingLR(T_max=8, eta_min=0.1)", cosine_decay(8, 0.1), cosine},
      {"warmup and step", "SequentialLR with StepLR", linear_warmup(4, step_decay(3, 0.3)),
       after_warmup(decay)},
      {"warmup and linear", "SequentialLR with LinearLR", linear_warmup(4, linear_decay(8, 0.2)),
       after_warmup(linear)},
      {"warmup and cosine", "SequentialLR with CosineAnnealingLR",
       linear_warmup(4, cosine_decay(8, 0.1)), after_warmup(cosine)},
  };
}

TEST(LrScheduleTest, EveryFormulaGivesTheRatesOfTorchInPython) {
  for (const Reference& reference : references()) {
    const std::vector<double> rates = rates_of(reference.factor, reference.rates.size());
    for (size_t step = 0; step < rates.size(); ++step) {
      EXPECT_NEAR(rates[step], reference.rates[step], 1e-15)
          << reference.name << " in step " << step << " of " << reference.python;
    }
  }
}

// In C++, torch's first drop is one step late: in its first call the count is still 0.
TEST(LrScheduleTest, StepDecayGivesTheRatesOfTorchsStepLrOneStepEarlier) {
  for (const double gamma : {0.5, 0.9}) {
    torch::optim::SGD ours = optimizer_with({3e-4, 1e-3}), theirs = optimizer_with({3e-4, 1e-3});
    LrSchedule schedule(ours, step_decay(7, gamma));
    torch::optim::StepLR reference(theirs, 7, gamma);
    reference.step();
    for (int step = 0; step < 100; ++step) {
      for (const size_t group : {0u, 1u}) {
        if (gamma == 0.5) {
          EXPECT_EQ(rate(ours, group), rate(theirs, group)) << step;
        } else {  // torch multiplies step by step, and rounds each time
          EXPECT_NEAR(rate(ours, group) / rate(theirs, group), 1.0, 1e-14) << step;
        }
      }
      schedule.step();
      reference.step();
    }
  }
}

TEST(LrScheduleTest, DecaysStayAtTheirEnd) {
  for (const int64_t step : {8, 9, 16, 1'000'000}) {
    EXPECT_EQ(cosine_decay(8, 0.1)(step), 0.1);
    EXPECT_EQ(linear_decay(8)(step), 0.0);
  }
  EXPECT_EQ(linear_warmup(0, cosine_decay(8, 0.1))(0), 1.0);
}

TEST(LrScheduleTest, EveryGroupHasItsOwnBaseAndFactor) {
  torch::optim::SGD optimizer = optimizer_with({1.0, 10.0});
  LrSchedule schedule(optimizer, {constant_lr(), [](int64_t step) { return 1.0 / (1.0 + step); }});
  EXPECT_EQ(rate(optimizer, 1), 10.0);
  schedule.step();
  EXPECT_EQ(rate(optimizer, 0), 1.0);
  EXPECT_EQ(rate(optimizer, 1), 5.0);
  schedule.set_step(4);
  EXPECT_EQ(rate(optimizer, 1), 2.0);
  EXPECT_EQ(schedule.steps(), 4);
}

TEST(LrScheduleTest, OneFactorGoesOnWithGroupsThatAreAdded) {
  const std::vector<double> base = {1.0, 10.0, 100.0};
  const LrFactor factor = linear_decay(8);
  torch::optim::SGD optimizer = optimizer_with({1.0, 10.0});
  LrSchedule by_group(optimizer, {factor, factor}), schedule(optimizer, factor);
  schedule.set_step(3);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(std::vector{at::ones({1})}));
  optimizer.param_groups()[2].options().set_lr(base[2]);
  const std::string before = schedule.state();
  schedule.step();
  for (size_t g = 0; g < 3; ++g) EXPECT_EQ(rate(optimizer, g), base[g] * 0.5) << g;
  // As a process that goes on from a checkpoint makes them.
  for (const std::string& state : {before, schedule.state()}) {
    torch::optim::SGD resumed = optimizer_with(base);
    LrSchedule next(resumed, factor);
    next.set_state(state);
    next.set_step(4);
    for (size_t g = 0; g < 3; ++g) EXPECT_EQ(rate(resumed, g), rate(optimizer, g)) << g;
  }
  expect_words(error_of([&] { by_group.step(); }),
               {"2 parameter groups", "got 3", "one factor for all groups"});
}

TEST(LrScheduleTest, AnotherScheduleGoesOnFromTheStateWithTheSameBits) {
  const std::vector<double> base = {3e-4, 1.1e-3};
  for (const Reference& reference : references()) {
    torch::optim::SGD whole = optimizer_with(base), resumed = optimizer_with(base);
    LrSchedule first(whole, reference.factor), second(resumed, reference.factor);
    for (int step = 0; step < 5; ++step) first.step();
    second.set_state(first.state());
    for (int step = 5; step < 20; ++step) {
      EXPECT_EQ(first.steps(), second.steps());
      for (const size_t group : {0u, 1u}) EXPECT_EQ(rate(whole, group), rate(resumed, group));
      first.step();
      second.step();
    }
  }
}

TEST(LrScheduleTest, TheStateOfAnotherScheduleIsRefusedAndChangesNothing) {
  torch::optim::SGD saved = optimizer_with({1.0});
  LrSchedule schedule(saved, linear_warmup(4, cosine_decay(8)));
  schedule.set_step(6);
  const std::string state = schedule.state();

  torch::optim::SGD optimizer = optimizer_with({1.0});
  LrSchedule longer(optimizer, linear_warmup(4, cosine_decay(80)));
  longer.set_step(2);
  expect_words(error_of([&] { longer.set_state(state); }),
               {"0.868198", "step 6", "set_step(6)", "same arguments"});
  for (const char* bad :
       {"", "{}", "7", "[6]", "{\"step\":6,\"learning_rates\":[]}",
        "{\"step\":-6,\"learning_rates\":[1.0]}", "{\"step\":6,\"learning_rates\":[0.5,0.5]}",
        "{\"step\":6,\"learning_rates\":[null]}"}) {
    expect_words(error_of([&] { longer.set_state(bad); }), {"LrSchedule: expected "});
  }
  EXPECT_EQ(longer.steps(), 2);
  EXPECT_EQ(rate(optimizer), 0.75);

  torch::optim::SGD other = optimizer_with({2.0});
  LrSchedule doubled(other, linear_warmup(4, cosine_decay(8)));
  expect_words(error_of([&] { doubled.set_state(state); }), {"as in the run that was saved"});
}

TEST(LrScheduleTest, TheStateBehindTheLastStepOfAPowerLoads) {
  // Step 4 is not trained, and a program that saves behind it can still be resumed.
  const LrFactor power = [](int64_t step) { return std::sqrt(3.0 - static_cast<double>(step)); };
  torch::optim::SGD whole = optimizer_with({1.0}), resumed = optimizer_with({1.0});
  LrSchedule first(whole, power), second(resumed, power);
  first.set_step(4);
  EXPECT_TRUE(std::isnan(rate(whole)));
  second.set_state(first.state());
  EXPECT_EQ(second.steps(), 4);
}

TEST(LrScheduleTest, WhatMakesNoScheduleIsRefused) {
  torch::optim::SGD optimizer = optimizer_with({1.0, 1.0});
  const auto refused = [](const std::function<void()>& call, const std::string& words) {
    expect_words(error_of(call), {words});
  };
  refused([&] { LrSchedule(optimizer, std::vector<LrFactor>{constant_lr()}); },
          "LrSchedule: expected a factor for each of 2 parameter groups, got 1");
  refused([&] { LrSchedule(optimizer, LrFactor()); },
          "LrSchedule: expected a factor for parameter group 0, got an empty function");
  refused([] { cosine_decay(0); }, "cosine_decay: expected at least 1 steps, got 0");
  refused([] { linear_decay(-1); }, "linear_decay: expected at least 1 steps, got -1");
  refused([] { step_decay(0, 0.5); }, "step_decay: expected at least 1 steps, got 0");
  refused([] { step_decay(1, std::numeric_limits<double>::quiet_NaN()); },
          "step_decay: expected a factor of at least 0, got nan");
  refused([] { constant_lr(-1.0); }, "constant_lr: expected a factor of at least 0, got -1");
  refused([] { linear_warmup(-1, constant_lr()); },
          "linear_warmup: expected at least 0 steps, got -1");
  refused([] { linear_warmup(1, nullptr); }, "linear_warmup: expected what follows");
  LrSchedule schedule(optimizer, constant_lr());
  refused([&] { schedule.set_step(-1); }, "LrSchedule: expected a step of at least 0, got -1");
  optimizer.param_groups()[0].options().set_lr(std::numeric_limits<double>::infinity());
  refused([&] { LrSchedule(optimizer, constant_lr()); },
          "LrSchedule: expected a finite learning rate in group 0, got inf");
}

}  // namespace
}  // namespace zero
