// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/ema.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tests/support/random_tensors.h"

namespace zero {
namespace {

std::vector<at::Tensor> rows(uint64_t seed) {
  return {random_tensor({1000}, seed), at::zeros({0}), random_tensor({37}, seed + 1)};
}

Ema::MasterOf of(std::vector<at::Tensor> rows) {
  return [rows = std::move(rows)](int64_t bucket) { return rows[static_cast<size_t>(bucket)]; };
}

TEST(EmaTest, FollowsItsFormula) {
  for (const bool warm_up : {false, true}) {
    const double decay = 0.6;
    Ema ema(EmaOptions().decay(decay).warm_up(warm_up), 3, of(rows(1)));
    std::vector<std::vector<double>> expected;
    for (const at::Tensor& row : rows(1)) {
      const auto* begin = row.const_data_ptr<float>();
      expected.emplace_back(begin, begin + row.numel());
    }
    for (int64_t step = 1; step <= 20; ++step) {
      const auto masters = rows(static_cast<uint64_t>(10 * step));
      const double t = static_cast<double>(step);
      const double d = warm_up ? std::min(decay, (1 + t) / (10 + t)) : decay;
      ema.begin(step);
      for (int64_t b = 2; b >= 0; --b) {
        ema.update(b, masters[b]);
        for (int64_t i = 0; i < masters[b].numel(); ++i) {
          double& e = expected[b][i];
          e = d * e + (1 - d) * masters[b].const_data_ptr<float>()[i];
          ASSERT_NEAR(ema.row(b).const_data_ptr<float>()[i], e, 2e-6) << warm_up << " " << step;
        }
      }
    }
    // With the decay of all later steps the warm-up is over at step 13: 14 / 23 is above 0.6.
    EXPECT_EQ(Ema::weight(EmaOptions().decay(decay).warm_up(warm_up), 13), 1 - decay);
    EXPECT_EQ(Ema::weight(EmaOptions().decay(decay).warm_up(warm_up), 12) == 1 - decay, !warm_up);
  }
}

TEST(EmaTest, WhatTheDeviceKnowsHasTheBitsOfWhatTheHostKnows) {
  for (const bool warm_up : {false, true}) {
    const auto options = EmaOptions().decay(0.9).warm_up(warm_up);
    Ema host(options, 3, of(rows(3))), device(options, 3, of(rows(3)));
    const auto flag = [](double value) { return at::full({}, value, at::kDouble); };
    for (int64_t step = 1; step <= 200; ++step) {
      const auto masters = rows(static_cast<uint64_t>(7 * step));
      host.begin(step);
      device.begin(flag(static_cast<double>(step)), step % 2 == 0 ? flag(0) : at::Tensor());
      for (const int64_t b : {0, 1, 2}) {
        host.update(b, masters[b]);
        device.update(b, masters[b]);
        ASSERT_TRUE(at::equal(host.row(b), device.row(b))) << step;
      }
      // A skipped step.
      device.begin(flag(static_cast<double>(step)), flag(1));
      device.update(0, at::full({1000}, 1e6));
      ASSERT_TRUE(at::equal(host.row(0), device.row(0))) << step;
    }
  }
}

// A row is cut elsewhere on another number of ranks.
TEST(EmaTest, BitsDoNotDependOnWhereARowBegins) {
  constexpr int64_t kNumel = 70001;  // more than is taken at a time
  const at::Tensor initial = random_tensor({kNumel}, 1), master = random_tensor({kNumel}, 2);
  Ema whole(EmaOptions().decay(0.99), 1, of({initial}));
  whole.begin(5);
  whole.update(0, master);
  EXPECT_TRUE(at::equal(whole.row(0),
                        initial + (master - initial) * Ema::weight(EmaOptions().decay(0.99), 5)));
  for (const int64_t begin : {1, 3, 7, 100, 69990}) {
    Ema part(EmaOptions().decay(0.99), 1, of({initial.narrow(0, begin, kNumel - begin)}));
    part.begin(5);
    part.update(0, master.narrow(0, begin, kNumel - begin));
    EXPECT_TRUE(at::equal(part.row(0), whole.row(0).narrow(0, begin, kNumel - begin))) << begin;
  }
}

TEST(EmaTest, BeginsAgainAsTheMastersAre) {
  const auto masters = rows(5);
  Ema ema(EmaOptions(), 3, of(rows(1)));
  ema.restart(of(masters));
  for (const int64_t b : {0, 2}) {
    EXPECT_TRUE(at::equal(ema.row(b), masters[b]));
    EXPECT_FALSE(ema.row(b).is_alias_of(masters[b]));
  }
  EXPECT_EQ(ema.bytes(), 4 * 1037);
}

}  // namespace
}  // namespace zero
