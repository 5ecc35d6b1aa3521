// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/group_options.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

namespace zero {
namespace {

DeviceRates::ParamGroups groups_of(const std::vector<double>& rates) {
  DeviceRates::ParamGroups groups;
  for (const double rate : rates) {
    groups.emplace_back(std::vector<at::Tensor>{at::zeros({1})},
                        std::make_unique<torch::optim::SGDOptions>(rate));
  }
  return groups;
}

TEST(DeviceRatesTest, EachGroupHasItsOwnWhichFollowsWhatIsSent) {
  DeviceRates rates(groups_of({0.1, 0.2}), at::kCPU);
  const double* const second = rates.of(1);
  EXPECT_EQ(*rates.of(0), 0.1);
  EXPECT_EQ(*second, 0.2);
  rates.send(groups_of({0.1, 0.3}));
  EXPECT_EQ(*rates.of(0), 0.1);
  EXPECT_EQ(*second, 0.3);
  EXPECT_EQ(rates.of(1), second);  // a graph has the address
}

TEST(DeviceRatesTest, KnowsWhatWasSentLast) {
  DeviceRates rates(groups_of({0.1, 0.2}), at::kCPU);
  EXPECT_TRUE(rates.are_sent(groups_of({0.1, 0.2})));
  EXPECT_FALSE(rates.are_sent(groups_of({0.1, 0.25})));
  rates.send(groups_of({0.1, 0.25}));
  EXPECT_TRUE(rates.are_sent(groups_of({0.1, 0.25})));
}

}  // namespace
}  // namespace zero
