// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero::Lion by itself. Its adapter is in adapter_test, its kernel in kernels/update_test, sharded
// runs in zero_optimizer_test and checkpoint_test.
#include "zero/lion.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/inner_optimizers/own_class.h"
#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "zero/inner_optimizers/registry.h"

namespace zero {
namespace {

constexpr int64_t kNumel = 1003;

at::Tensor initial() { return random_tensor({kNumel}, 3).requires_grad_(); }

// Every tenth element has no gradient.
at::Tensor gradient(int step) {
  at::Tensor g = random_tensor({kNumel}, 100 + static_cast<uint64_t>(step));
  for (int64_t i = 0; i < kNumel; i += 10) g[i] = 0;
  return g;
}

LionOptions options() { return LionOptions(0.01).betas({0.8, 0.95}).weight_decay(0.1); }

Lion over(const at::Tensor& p) { return Lion(std::vector<at::Tensor>{p}, options()); }

void steps(Lion& lion, at::Tensor p, int first, int last) {
  for (int step = first; step < last; ++step) {
    p.mutable_grad() = gradient(step);
    lion.step();
  }
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

TEST(LionTest, AStepIsTheFormula) {
  const at::Tensor p = initial();
  std::vector<float> expected(p.const_data_ptr<float>(), p.const_data_ptr<float>() + kNumel);
  std::vector<float> m(kNumel, 0.0F);
  Lion lion = over(p);
  for (int step = 0; step < 4; ++step) {
    steps(lion, p, step, step + 1);
    const at::Tensor g = gradient(step);
    for (int64_t i = 0; i < kNumel; ++i) {
      const float g_i = g.const_data_ptr<float>()[i];
      const float old = 0.8F * m[i], added = static_cast<float>(1.0 - 0.8) * g_i;
      const float direction = old + added;
      expected[i] *= static_cast<float>(1.0 - 0.01 * 0.1);
      if (direction != 0) expected[i] += direction > 0 ? -0.01F : 0.01F;
      const float kept = 0.95F * m[i], fresh = static_cast<float>(1.0 - 0.95) * g_i;
      m[i] = kept + fresh;
      ASSERT_EQ(p.const_data_ptr<float>()[i], expected[i]) << "step " << step << " element " << i;
    }
  }
}

TEST(LionTest, TheFusedUpdateHasTheBitsOfTheStep) {
  const at::Tensor p = initial(), master = p.detach().clone();
  Lion lion = over(p), fused = over(master);
  const float one = 1;
  for (int step = 0; step < 4; ++step) {
    at::Tensor g = gradient(step);
    g[5] = std::numeric_limits<float>::quiet_NaN();
    p.mutable_grad() = g;
    lion.step();
    lion_adapter().fused()->update(fused, 0, {{&master, g.const_data_ptr<float>()}},
                                   {&one, nullptr}, at::kFloat, {});
    ASSERT_TRUE(same_bits(p, master)) << "step " << step;
  }
  EXPECT_TRUE(std::isfinite(p[5].item<float>())) << "NaN has no direction";
}

TEST(LionTest, GroupsHaveTheirOwnOptionsAndParametersWithoutGradientStay) {
  const at::Tensor a = at::ones({2}), b = at::ones({2}), c = at::ones({2});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{a}, std::make_unique<LionOptions>(0.5));
  groups.emplace_back(std::vector<at::Tensor>{b, c});
  Lion lion(groups, LionOptions(0.25));
  a.mutable_grad() = at::ones({2});
  b.mutable_grad() = -at::ones({2});
  const at::Tensor loss = lion.step([] {
    EXPECT_TRUE(at::GradMode::is_enabled());
    return at::full({}, 3.0);
  });
  EXPECT_EQ(loss.item<double>(), 3.0);
  EXPECT_TRUE(at::equal(a, at::full({2}, 0.5)));
  EXPECT_TRUE(at::equal(b, at::full({2}, 1.25)));
  EXPECT_TRUE(at::equal(c, at::ones({2})));
  EXPECT_EQ(lion.state().size(), 2);
}

TEST(LionTest, SavedAndLoadedItGoesOnInEveryBit) {
  expect_goes_on_from_its_archive<Lion>({initial()}, options(), LionOptions(7));
}

// Two roundings, of the factor and of the product, would give other bits.
TEST(LionTest, DecaysAreNotRoundedToTheDtypeOfAParameter) {
  const auto times = [](const at::Tensor& x, double factor) {
    return (x.detach().to(at::kFloat) * factor).to(at::kBFloat16);
  };
  const at::Tensor p = random_tensor({kNumel}, 1).to(at::kBFloat16).requires_grad_();
  Lion lion(std::vector<at::Tensor>{p}, LionOptions(0.5).betas({0.9, 0.99}).weight_decay(0.2));
  p.mutable_grad() = at::zeros({kNumel}, at::kBFloat16);
  const at::Tensor decayed = times(p, 0.9);
  lion.step();
  EXPECT_TRUE(at::equal(p, decayed));
  auto& average = static_cast<LionParamState&>(*lion.state().begin()->second).exp_avg();
  average.copy_(random_tensor({kNumel}, 2));
  const at::Tensor expected = times(average, 0.99);
  lion.step();
  EXPECT_TRUE(at::equal(average, expected));
}

// All classes of this library take the options of groups by the same function.
TEST(LionTest, OptionsOfAnotherClassAreRefused) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{initial()});
  groups.emplace_back(std::vector<at::Tensor>{initial()},
                      std::make_unique<torch::optim::SGDOptions>(0.1));
  expect_words(error_of([&] { Lion lion(groups); }),
               {"parameter group 1: expected options of class zero::LionOptions",
                "got torch::optim::SGDOptions", "none to have the defaults"});
}

TEST(LionTest, OptionsThatCannotTrainAreRefused) {
  expect_words(refused<Lion>(LionOptions(-1)), {"learning rate of 0 or more", "-1"});
  expect_words(refused<Lion>(LionOptions().betas({1.0, 0.9})), {"betas", "got 1 and 0.9"});
  expect_words(refused<Lion>(LionOptions().betas({0.9, -0.5})), {"betas", "-0.5"});
  expect_words(refused<Lion>(LionOptions().weight_decay(-2)), {"weight decay of 0 or more", "-2"});
}

}  // namespace
}  // namespace zero
