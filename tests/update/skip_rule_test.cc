// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/skip_rule.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <limits>
#include <random>
#include <string>

#include "tests/support/error_of.h"

namespace zero {
namespace {

at::Tensor scalar(double value) { return at::full({}, value, at::kDouble); }

bool leaves_out(OutlierRule& rule, double norm) {
  return rule.leaves_out(scalar(norm)).item<bool>();
}

// The formula of the header, value by value.
class Reference {
 public:
  Reference(double sigmas, size_t window) : sigmas_(sigmas), window_(window) {}

  bool judge(double x) {
    double mean = 0, square = 0;
    for (const double v : values_) mean += v / static_cast<double>(values_.size());
    for (const double v : values_) square += (v - mean) * (v - mean);
    const double deviation = std::sqrt(square / (static_cast<double>(values_.size()) - 1));
    const size_t needed = std::min(window_, std::max<size_t>(20, window_ / 2));
    const bool outlier = values_.size() >= needed && x > mean + sigmas_ * deviation;
    if (std::isfinite(x)) values_.push_back(x);
    if (values_.size() > window_) values_.pop_front();
    return outlier;
  }

 private:
  const double sigmas_;
  const size_t window_;
  std::deque<double> values_;
};

TEST(OutlierRuleTest, LeavesOutWhatIsAboveTheMeanByThatManyDeviations) {
  std::mt19937_64 random(1);
  std::lognormal_distribution<double> values(0.0, 0.5);
  for (const int64_t window : {2, 5, 25, 64}) {
    for (const double sigmas : {0.5, 2.0}) {
      OutlierRule rule(sigmas, window);
      Reference reference(sigmas, static_cast<size_t>(window));
      int left_out = 0;
      for (int i = 0; i < 300; ++i) {
        double x = values(random);
        if (i % 50 == 20) x = std::numeric_limits<double>::quiet_NaN();
        if (i % 50 == 30) x = std::numeric_limits<double>::infinity();
        const bool expected = reference.judge(x);
        left_out += expected ? 1 : 0;
        ASSERT_EQ(leaves_out(rule, x), expected) << "value " << i << " of window " << window;
      }
      EXPECT_GT(left_out, 5);
      EXPECT_LT(left_out, 200);
    }
  }
}

TEST(OutlierRuleTest, ANewLevelIsAcceptedAfterSomeSteps) {
  OutlierRule rule(3, 20);
  for (int i = 0; i < 30; ++i) EXPECT_FALSE(leaves_out(rule, 1 + 0.1 * (i % 2)));
  EXPECT_TRUE(leaves_out(rule, 10));
  int left_out = 0;
  for (int i = 0; i < 30; ++i) left_out += leaves_out(rule, 10 + 0.1 * (i % 2)) ? 1 : 0;
  EXPECT_LT(left_out, 5);
}

TEST(OutlierRuleTest, ALossThatIsGivenIsJudgedToo) {
  OutlierRule rule(3, 4);
  const auto step = [&](double norm, double loss) {
    rule.set_loss(at::full({1}, loss, at::kFloat));
    return leaves_out(rule, norm);
  };
  for (int i = 0; i < 8; ++i) EXPECT_FALSE(step(1 + 0.1 * (i % 2), 2 + 0.1 * (i % 2)));
  EXPECT_TRUE(step(1, 9));
  EXPECT_FALSE(leaves_out(rule, 1)) << "the loss of one step counts for one step";
  EXPECT_TRUE(step(9, 2));
  rule.set_loss(at::zeros({2}));
  expect_words(error_of([&] { leaves_out(rule, 1); }), {"one element", "[2]"});
}

TEST(OutlierRuleTest, AStateGoesOnInEveryBitAndInAnotherWindow) {
  std::mt19937_64 random(2);
  std::lognormal_distribution<double> values(0.0, 0.5);
  for (const int begin : {0, 3, 40}) {
    OutlierRule rule(1, 25);
    for (int i = 0; i < begin; ++i) {
      rule.set_loss(scalar(values(random)));
      leaves_out(rule, values(random));
    }
    OutlierRule resumed(1, 25), smaller(1, 10);
    resumed.set_state(rule.state());
    smaller.set_state(rule.state());
    EXPECT_EQ(resumed.state(), rule.state());
    OutlierRule of_smaller(1, 10);
    of_smaller.set_state(smaller.state());
    EXPECT_EQ(of_smaller.state(), smaller.state());
    for (int i = 0; i < 40; ++i) {
      const double norm = values(random), loss = values(random);
      rule.set_loss(scalar(loss));
      resumed.set_loss(scalar(loss));
      smaller.set_loss(scalar(loss));
      ASSERT_EQ(leaves_out(resumed, norm), leaves_out(rule, norm)) << i;
      leaves_out(smaller, norm);
    }
    EXPECT_EQ(resumed.state(), rule.state());
    // The newest of the larger window are those of the smaller one.
    of_smaller.set_state(rule.state());
    EXPECT_EQ(smaller.state(), of_smaller.state());
  }
}

TEST(OutlierRuleTest, ArgumentsAndStatesThatCannotWorkAreRefused) {
  expect_words(error_of([] { OutlierRule(0); }), {"sigmas above 0", "got 0"});
  expect_words(error_of([] { OutlierRule(std::nan("")); }), {"sigmas above 0"});
  expect_words(error_of([] { OutlierRule(6, 1); }), {"at least 2 steps", "got 1"});
  OutlierRule rule;
  leaves_out(rule, 3);
  const std::string before = rule.state();
  for (const char* bad : {"", "{", "[]", "{\"norms\":[1]}", "{\"norms\":[\"x\"],\"losses\":[]}"}) {
    expect_words(error_of([&] { rule.set_state(bad); }), {"state of an OutlierRule", "leave"});
    EXPECT_EQ(rule.state(), before);
  }
}

}  // namespace
}  // namespace zero
