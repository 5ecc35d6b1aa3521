// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Random numbers go on where the state was saved.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

// An odd count of normal numbers leaves half of a pair behind in the generator.
std::vector<at::Tensor> draw() {
  return {at::dropout(at::ones({101}), 0.5, /*train=*/true), at::randn({3}), at::randn({1})};
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

TEST(RandomStateTest, DropoutAndNormalNumbersGoOnWithTheSameBits) {
  at::manual_seed(5);
  draw();
  const std::string state = RandomState(at::kCPU).state();
  const std::vector<at::Tensor> expected = draw();
  ASSERT_FALSE(same(draw(), expected));
  at::manual_seed(77);
  RandomState(at::kCPU).set_state(state);
  EXPECT_TRUE(same(draw(), expected));
}

TEST(RandomStateTest, DropoutOnAGpuGoesOnWithTheSameBits) {
  if (!at::hasCUDA() || at::detail::getCUDAHooks().deviceCount() == 0) GTEST_SKIP() << "no GPU";
  const at::Device gpu(at::kCUDA, 0);
  const auto drop = [&] { return at::dropout(at::ones({101}, gpu), 0.5, /*train=*/true).cpu(); };
  at::manual_seed(5);
  const std::string state = RandomState(gpu).state();
  const at::Tensor expected = drop(), on_the_host = at::randn({7});
  ASSERT_FALSE(at::equal(drop(), expected));
  RandomState(gpu).set_state(state);
  EXPECT_TRUE(at::equal(drop(), expected));
  EXPECT_TRUE(at::equal(at::randn({7}), on_the_host));
  EXPECT_NE(error_of([&] { RandomState(at::kCPU).set_state(state); }), "");
}

TEST(RandomStateTest, GeneratorsOfOnesOwnAreSavedInsteadOfTheDefaultOne) {
  at::Generator own = at::detail::createCPUGenerator(3), other = at::detail::createCPUGenerator(4);
  RandomState random({own, other});
  const std::string state = random.state();
  const at::Tensor first = at::randn({5}, own), second = at::randn({5}, other);
  const std::vector<at::Tensor> default_ones = draw();
  random.set_state(state);
  EXPECT_TRUE(at::equal(at::randn({5}, own), first));
  EXPECT_TRUE(at::equal(at::randn({5}, other), second));
  EXPECT_FALSE(same(draw(), default_ones));
}

TEST(RandomStateTest, OtherBytesAreRefusedAndChangeNothing) {
  RandomState random(at::kCPU);
  const std::string state = random.state();
  EXPECT_LT(state.size(), 6000u);
  at::Generator own = at::detail::createCPUGenerator(3);
  std::string broken = state;
  broken[1] = 'x';
  for (const std::string& bad : {std::string(), state.substr(0, 9), state.substr(0, 100),
                                 state + "1", broken, RandomState({own, own}).state()}) {
    expect_words(error_of([&] { random.set_state(bad); }), {"RandomState", "expected", "got"});
  }
  EXPECT_EQ(random.state(), state);
  EXPECT_NE(error_of([] { RandomState({at::Generator()}); }), "");
  if (!at::hasCUDA()) {
    expect_words(error_of([] { RandomState random(at::Device(at::kCUDA, 0)); }), {"no CUDA"});
  }
}

}  // namespace
}  // namespace zero
