// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums of powers and the largest magnitude against long double sums, and the
// promise that threads and instruction sets do not change a bit.
#include "kernels/norm.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/kernels/reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(SumOfPowers, EverySizeAndSettingMatchesTheExactSumWithTheSameBits) {
  for (double p : {1.0, 2.0, 3.0, 0.5}) {
    for (int64_t numel : kSizes) {
      Buffer values(4 * numel, 4);
      fill_ordinary(values.as<float>(), numel, 9, 1e-3F);
      const ConstSpan span{values.as<float>(), numel};
      double expected[2] = {10.0, 3.0};
      reference::sum_of_abs_powers(span, p, expected);
      std::vector<double> sums;
      for_each_setting([&] {
        double got[2] = {10.0, 3.0};
        sum_of_abs_powers(span, p, got, nullptr, Stream{});
        ASSERT_NEAR(got[0], expected[0], 4e-15 * expected[0]) << "p " << p << ", numel " << numel;
        ASSERT_EQ(got[1], 3.0);
        sums.push_back(got[0]);
        ASSERT_EQ(sums.front(), got[0]);
      });
    }
  }
}

TEST(SumOfSquares, CuttingIntoSpansChangesNothingBeyondDoubleRounding) {
  constexpr int64_t kNumel = 500000;
  std::vector<float> values(kNumel);
  fill_ordinary(values.data(), kNumel, 10);
  double whole[2] = {};
  sum_of_squares(ConstSpan{values.data(), kNumel}, whole, nullptr, Stream{});
  for (int64_t length : {1, 3, 1000, 16384, 77777}) {
    std::vector<ConstSpan> spans;
    for (int64_t begin = 0; begin < kNumel; begin += length) {
      spans.push_back({values.data() + begin, std::min(length, kNumel - begin)});
      spans.push_back({nullptr, 0});
    }
    double parts[2] = {};
    sum_of_squares(spans, parts, nullptr, Stream{});
    EXPECT_NEAR(parts[0], whole[0], 2e-15 * whole[0]) << "length " << length;
  }
}

TEST(SumOfSquares, LargeFiniteValuesHaveAFiniteSum) {
  const std::vector<float> values(1000, 1e19F);
  const std::vector<float> largest(1000, std::numeric_limits<float>::max());
  for_each_setting([&] {
    double result[2] = {};
    sum_of_squares(ConstSpan{values.data(), 1000}, result, nullptr, Stream{});
    EXPECT_NEAR(result[0], 1e41, 1e35);
    EXPECT_EQ(result[1], 0.0);
    sum_of_squares(ConstSpan{largest.data(), 1000}, result, nullptr, Stream{});
    EXPECT_TRUE(std::isfinite(result[0]));
    EXPECT_EQ(result[1], 0.0);
  });
}

TEST(SumOfSquares, TinyValuesAreNotLost) {
  const std::vector<float> values(1000, std::numeric_limits<float>::denorm_min());
  double result[2] = {};
  sum_of_squares(ConstSpan{values.data(), 1000}, result, nullptr, Stream{});
  EXPECT_GT(result[0], 0.0);
}

TEST(SumOfPowers, CountsEveryValueThatIsNotFinite) {
  constexpr int64_t kNumel = 50000;
  for (double p : {1.0, 2.0, 3.0}) {
    for (float bad : {kInfinity, -kInfinity, std::nanf("")}) {
      for (int64_t position : {0, 1, 15, 16383, 16384, 49999}) {
        std::vector<float> values(kNumel, 0.5F);
        values[position] = bad;
        values[position / 2] = bad;
        for_each_setting([&] {
          double result[2] = {};
          sum_of_abs_powers(ConstSpan{values.data(), kNumel}, p, result, nullptr, Stream{});
          ASSERT_EQ(result[1], position == 0 ? 1.0 : 2.0);
          ASSERT_FALSE(std::isfinite(result[0]));
        });
      }
    }
  }
}

TEST(SumOfPowers, OverflowOfAHighPowerIsNotCountedAsANonFiniteInput) {
  const float value = 1e30F;
  double result[2] = {};
  sum_of_abs_powers(ConstSpan{&value, 1}, 20.0, result, nullptr, Stream{});
  EXPECT_TRUE(std::isinf(result[0]));
  EXPECT_EQ(result[1], 0.0);
}

TEST(MaxAbsBits, EverySizeAndSettingMatchesTheReference) {
  for (int64_t numel : kSizes) {
    Buffer values(4 * numel, 4);
    fill_ordinary(values.as<float>(), numel, 11);
    const ConstSpan span{values.as<float>(), numel};
    int64_t expected = 5;
    reference::max_abs_bits(span, &expected);
    for_each_setting([&] {
      int64_t got = 5;
      max_abs_bits(span, &got, Stream{});
      ASSERT_EQ(got, expected);
    });
  }
}

TEST(MaxAbsBits, NaNIsAboveInfinityAndInfinityAboveNumbers) {
  std::vector<float> values(20000, -1.0F);
  const auto bits = [&] {
    int64_t result = 0;
    max_abs_bits(ConstSpan{values.data(), 20000}, &result, Stream{});
    return result;
  };
  for_each_setting([&] {
    values.assign(20000, -1.0F);
    EXPECT_EQ(bits(), std::bit_cast<int32_t>(1.0F));
    values[17000] = -kInfinity;
    EXPECT_EQ(bits(), 0x7f800000);
    values[3] = std::nanf("");
    EXPECT_GT(bits(), 0x7f800000);
  });
}

TEST(SumOfPowers, RefusesPowersThatAreNotPositiveAndFinite) {
  double result[2] = {};
  EXPECT_THROW(sum_of_abs_powers({}, 0.0, result, nullptr, Stream{}), c10::Error);
  EXPECT_THROW(sum_of_abs_powers({}, kInfinity, result, nullptr, Stream{}), c10::Error);
  EXPECT_THROW(sum_of_squares({}, nullptr, nullptr, Stream{}), c10::Error);
}

}  // namespace
}  // namespace zero::kernels
