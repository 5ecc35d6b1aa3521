// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero::Lamb against its formula in double.
#include "zero/lamb.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tests/inner_optimizers/own_class.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"

namespace zero {
namespace {

double distance(const at::Tensor& a, const at::Tensor& b) {
  return (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// Algorithm 2 of the paper, element by element.
class Reference {
 public:
  Reference(const at::Tensor& p, LambOptions options) : o_(std::move(options)) {
    const at::Tensor values = p.detach().to(at::kDouble).contiguous();
    p_.assign(values.const_data_ptr<double>(), values.const_data_ptr<double>() + p.numel());
    m_.assign(p_.size(), 0);
    v_.assign(p_.size(), 0);
  }

  void step(const at::Tensor& gradient) {
    const auto [beta1, beta2] = o_.betas();
    const at::Tensor g = gradient.to(at::kDouble).contiguous();
    ++t_;
    const double correct1 = o_.bias_correction() ? 1 - std::pow(beta1, t_) : 1;
    const double correct2 = o_.bias_correction() ? 1 - std::pow(beta2, t_) : 1;
    std::vector<double> u(p_.size());
    double of_p = 0, of_u = 0;
    for (size_t i = 0; i < p_.size(); ++i) {
      const double x = g.const_data_ptr<double>()[i];
      m_[i] = beta1 * m_[i] + (1 - beta1) * x;
      v_[i] = beta2 * v_[i] + (1 - beta2) * x * x;
      u[i] =
          m_[i] / correct1 / (std::sqrt(v_[i] / correct2) + o_.eps()) + o_.weight_decay() * p_[i];
      of_p += p_[i] * p_[i];
      of_u += u[i] * u[i];
    }
    double phi = std::sqrt(of_p);
    if (o_.norm_bounds()) {
      phi = std::min(std::max(phi, std::get<0>(*o_.norm_bounds())), std::get<1>(*o_.norm_bounds()));
    }
    const double trust = o_.adapt() && phi != 0 && of_u != 0 ? phi / std::sqrt(of_u) : 1;
    for (size_t i = 0; i < p_.size(); ++i) p_[i] -= o_.lr() * trust * u[i];
  }

  at::Tensor value(at::IntArrayRef shape) const {
    return at::tensor(p_, at::kDouble).reshape(shape);
  }

 private:
  LambOptions o_;
  std::vector<double> p_, m_, v_;
  int t_ = 0;
};

std::vector<LambOptions> several_options() {
  return {LambOptions(0.1),
          LambOptions(0.1).weight_decay(0.25).betas({0.8, 0.95}).eps(1e-3),
          LambOptions(0.1).bias_correction(false).betas({0.0, 0.5}),
          LambOptions(0.1).norm_bounds(std::make_tuple(0.5, 1.0)),
          LambOptions(0.1).norm_bounds(std::make_tuple(100.0, 200.0)),
          LambOptions(0.1).adapt(false).weight_decay(0.125)};
}

TEST(LambTest, StepsAreTheFormulaForEveryShape) {
  for (const LambOptions& options : several_options()) {
    for (const auto& shape :
         std::vector<std::vector<int64_t>>{{}, {1}, {37}, {20, 48}, {48, 20}, {3, 5, 7}, {0}}) {
      const at::Tensor p = parameter(shape);
      const at::Tensor wide = p.detach().to(at::kDouble).requires_grad_();
      Reference reference(p, options);
      Lamb lamb(Params{p, wide}, options);
      for (int step = 0; step < 10; ++step) {
        p.mutable_grad() = gradient(p, step);
        wide.mutable_grad() = p.grad().to(at::kDouble);
        reference.step(p.grad());
        lamb.step();
      }
      if (p.numel() == 0) continue;
      const at::Tensor expected = reference.value(shape);
      const double scale = std::max(1.0, expected.abs().max().item<double>());
      EXPECT_LE(distance(p, expected), 2e-5 * scale) << p.sizes();
      EXPECT_LE(distance(wide, expected), 1e-12 * scale) << p.sizes();
    }
  }
}

// Two roundings, of the factor and of the product, would give other bits.
TEST(LambTest, AveragesInBf16AreScaledByFactorsThatAreNotRounded) {
  const at::Tensor p = at::ones({256}, at::kBFloat16).requires_grad_();
  Lamb lamb(Params{p}, LambOptions(0.0).betas({0.7, 0.9}));
  p.mutable_grad() = gradient(p, 1);
  lamb.step();
  const auto& state = static_cast<const LambParamState&>(*lamb.state().begin()->second);
  const at::Tensor expected = (state.exp_avg().to(at::kFloat) * 0.7).to(at::kBFloat16);
  const at::Tensor expected_sq = (state.exp_avg_sq().to(at::kFloat) * 0.9).to(at::kBFloat16);
  p.mutable_grad().zero_();
  lamb.step();
  EXPECT_TRUE(at::equal(state.exp_avg(), expected));
  EXPECT_TRUE(at::equal(state.exp_avg_sq(), expected_sq));
}

// The norm is 94868, which is infinite in fp16.
TEST(LambTest, NormsOf16BitParametersAreMadeInFp32) {
  const at::Tensor p = at::full({100000}, 300.0, at::kHalf).requires_grad_();
  p.mutable_grad() = at::ones({100000}, at::kHalf);
  Lamb lamb(Params{p}, LambOptions(0.5));
  lamb.step();
  EXPECT_LE(distance(p, at::full({100000}, 150.0)), 0.5);
}

TEST(LambTest, NormsOfManyElementsAreThoseOfDouble) {
  const at::Tensor values = values_that_a_float_loses();
  const at::Tensor every_second = at::empty({values.numel(), 2}).select(1, 0).copy_(values);
  for (const at::Tensor& given : {values.clone(), every_second}) {
    const at::Tensor p = given.detach().requires_grad_();
    const at::Tensor wide = values.to(at::kDouble).requires_grad_();
    p.mutable_grad() = values.clone();
    wide.mutable_grad() = values.to(at::kDouble);
    const at::Tensor start = wide.detach().clone();
    Lamb lamb(Params{p, wide}, LambOptions(0.5));
    lamb.step();
    const double moved = distance(wide.detach(), start);
    EXPECT_GT(moved, 1);
    EXPECT_LE(distance(p.detach(), wide.detach()), 1e-4 * moved);
  }
}

TEST(LambTest, AParameterOfZerosMoves) {
  const at::Tensor p = at::zeros({5}).requires_grad_();
  p.mutable_grad() = at::ones({5});
  Lamb lamb(Params{p}, LambOptions(0.5));
  lamb.step();
  EXPECT_LE(distance(p, at::full({5}, -0.5)), 1e-5);
  p.mutable_grad() = at::full({5}, std::nan(""));
  lamb.step();
  EXPECT_TRUE(at::isnan(p).all().item<bool>()) << "NaN must not be hidden";
}

TEST(LambTest, GroupsHaveTheirOwnOptionsAndParametersWithoutGradientStay) {
  expect_options_of_groups<Lamb>({8}, LambOptions(0.5), LambOptions(0.25), 2);
}

TEST(LambTest, SavedAndLoadedItGoesOnInEveryBit) {
  for (const auto& bounds :
       {std::optional<std::tuple<double, double>>(), std::optional(std::make_tuple(0.5, 2.0))}) {
    const LambOptions options = LambOptions(0.1)
                                    .betas({0.8, 0.95})
                                    .eps(1e-5)
                                    .weight_decay(0.25)
                                    .bias_correction(false)
                                    .norm_bounds(bounds)
                                    .adapt(bounds.has_value());
    expect_goes_on_from_its_archive<Lamb>({parameter({6, 5})}, options, LambOptions(7));
  }
}

TEST(LambTest, OptionsThatCannotTrainAreRefusedInEveryGroup) {
  expect_words(refused<Lamb>(LambOptions(-1)), {"learning rate of 0 or more", "-1"});
  expect_words(refused<Lamb>(LambOptions().betas({1.0, 0.9})), {"betas", "got 1 and 0.9"});
  expect_words(refused<Lamb>(LambOptions().eps(-2)), {"eps of 0 or more", "-2"});
  expect_words(refused<Lamb>(LambOptions().weight_decay(-2)), {"weight decay of 0 or more", "-2"});
  expect_words(refused<Lamb>(LambOptions().norm_bounds(std::make_tuple(3.0, 2.0))),
               {"norm_bounds", "got 3 and 2"});
}

}  // namespace
}  // namespace zero
