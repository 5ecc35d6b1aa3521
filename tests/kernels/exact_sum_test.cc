// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Exact sums against a number of single bits, and the promise that cuts, orders, ranks, threads and
// instruction sets change no bit of them.
#include "kernels/exact_sum.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kSmallest = std::numeric_limits<float>::denorm_min();

using Sum = std::vector<int64_t>;

// Bit i stands for 2^(i - 298). Works as one does on paper, one bit at a time.
class Bits {
 public:
  void add_bit(int64_t i) {
    for (; bits_[i]; ++i) bits_[i] = false;
    bits_[i] = true;
  }
  void add(double x) {
    int exponent = 0;
    auto mantissa = static_cast<int64_t>(std::ldexp(std::frexp(x, &exponent), 53));
    for (int64_t i = exponent - 53 + 298; mantissa != 0; ++i, mantissa /= 2) {
      if (mantissa % 2 != 0) add_bit(i);
    }
  }
  // The limbs, and no values that are not finite.
  Sum sum() const {
    Sum limbs(kExactNumel);
    for (int64_t i = 0; i < kBits; ++i) {
      if (bits_[i]) limbs[std::min(i / 32, kExactLimbs - 1)] += int64_t{1} << (i - limb_begin(i));
    }
    return limbs;
  }
  double value() const {
    int64_t top = kBits - 1;
    while (top > 0 && !bits_[top]) --top;
    double mantissa = 0.0;
    for (int64_t i = top; i > top - 53; --i) {
      mantissa = 2.0 * mantissa + (i >= 0 && bits_[i] ? 1.0 : 0.0);
    }
    const bool half = top >= 53 && bits_[top - 53];
    const bool more = top >= 53 && std::find(bits_.begin(), bits_.begin() + (top - 53), true) !=
                                       bits_.begin() + (top - 53);
    if (half && (more || std::fmod(mantissa, 2.0) == 1.0)) mantissa += 1.0;
    return std::ldexp(mantissa, static_cast<int>(top) - 52 - 298);
  }

 private:
  static int64_t limb_begin(int64_t i) { return 32 * std::min(i / 32, kExactLimbs - 1); }
  static constexpr int64_t kBits = 32 * kExactLimbs + 32;
  std::vector<bool> bits_ = std::vector<bool>(kBits);
};

// The order that the header promises.
double sum_of_block(const float* values, int64_t numel) {
  double sums[32] = {};
  for (int64_t i = 0; i < numel; ++i) {
    sums[i % 32] += static_cast<double>(values[i]) * values[i];
  }
  for (int half : {16, 8, 4, 2, 1}) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

Bits bits_of(const std::vector<ConstSpan>& spans) {
  Bits bits;
  for (const ConstSpan& span : spans) {
    for (int64_t begin = 0; begin < span.numel; begin += 256) {
      bits.add(sum_of_block(span.data + begin, std::min<int64_t>(256, span.numel - begin)));
    }
  }
  return bits;
}

Sum sum_of(c10::ArrayRef<ConstSpan> spans) {
  Sum sum(kExactNumel);
  add_squares_exactly(spans, sum.data(), Stream{});
  return sum;
}

double value_of(const Sum& sum) {
  const Sum before = sum;
  double value = -1.0;
  value_of_exact_sum(sum.data(), &value, Stream{});
  EXPECT_EQ(sum, before);
  return value;
}

uint64_t double_bits(double x) { return std::bit_cast<uint64_t>(x); }

// Every exponent and both signs, also subnormal and the largest; a quarter zeros.
void fill_finite(float* values, int64_t numel, uint32_t seed) {
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = generator();
    const uint32_t finite = (bits >> 23 & 0xffU) == 0xffU ? bits & 0xff7fffffU : bits;
    values[i] = generator() % 4 == 0 ? 0.0F : std::bit_cast<float>(finite);
  }
}

// One exponent for each 256 values, from subnormal squares to the largest.
void fill_by_blocks(float* values, int64_t numel, uint32_t seed) {
  fill_ordinary(values, numel, seed);
  std::mt19937 generator(seed);
  for (int64_t begin = 0; begin < numel; begin += 256) {
    const int exponent = static_cast<int>(generator() % 270) - 147;
    for (int64_t i = begin; i < std::min(begin + 256, numel); ++i) {
      values[i] = std::ldexp(values[i], exponent);
    }
  }
}

TEST(ExactSum, EverySizeAndSettingHasTheBitsOfTheOracle) {
  const auto fill_small = [](float* values, int64_t numel, uint32_t seed) {
    fill_ordinary(values, numel, seed, 1e-3F);
  };
  for (const auto& fill : {+fill_small, fill_finite, fill_by_blocks}) {
    for (int64_t numel : kSizes) {
      Buffer values(4 * numel, 4);
      fill(values.as<float>(), numel, static_cast<uint32_t>(numel));
      const ConstSpan span{values.as<float>(), numel};
      const Bits expected = bits_of({span});
      for_each_setting([&] {
        const Sum got = sum_of(span);
        ASSERT_EQ(got, expected.sum()) << "numel " << numel;
        ASSERT_EQ(double_bits(value_of(got)), double_bits(expected.value())) << "numel " << numel;
      });
    }
  }
}

TEST(ExactSum, ValueIsTheSumOfSquares) {
  constexpr int64_t kNumel = 100003;
  std::vector<float> values(kNumel);
  fill_ordinary(values.data(), kNumel, 3);
  long double expected = 0.0L;
  for (const float x : values) expected += static_cast<long double>(x) * x;
  const double got = value_of(sum_of(ConstSpan{values.data(), kNumel}));
  EXPECT_NEAR(got, static_cast<double>(expected), 1e-15 * got);
}

TEST(ExactSum, CutsAtBlocksAndOrdersOfSpansChangeNothing) {
  constexpr int64_t kNumel = 300 * 256 + 77;
  std::vector<float> values(kNumel);
  std::mt19937 generator(4);
  for (const auto& fill : {fill_finite, fill_by_blocks}) {
    fill(values.data(), kNumel, 5);
    const Sum whole = sum_of(ConstSpan{values.data(), kNumel});
    for (int64_t longest : {1, 2, 7, 100}) {
      std::vector<ConstSpan> spans;
      for (int64_t begin = 0; begin < kNumel;) {
        const int64_t numel = std::min<int64_t>(
            256 * (1 + static_cast<int64_t>(generator()) % longest), kNumel - begin);
        spans.push_back({values.data() + begin, numel});
        spans.push_back({nullptr, 0});
        begin += numel;
      }
      std::shuffle(spans.begin(), spans.end(), generator);
      for_each_setting([&] { ASSERT_EQ(sum_of(spans), whole) << "up to " << longest; });
    }
  }
}

TEST(ExactSum, BlocksAreCountedFromTheFirstElementOfASpan) {
  // 2^-53 is lost beside 1 in one block, and not in two.
  std::vector<float> values(256, 0.0F);
  values[0] = 1.0F;
  values[224] = 0x1p-30F;
  const ConstSpan whole{values.data(), 256};
  EXPECT_EQ(sum_of(whole), sum_of(ConstSpan{values.data(), 1}));
  const std::vector<ConstSpan> cut = {{values.data(), 100}, {values.data() + 100, 156}};
  EXPECT_NE(sum_of(cut), sum_of(whole));
  EXPECT_EQ(sum_of(cut), bits_of(cut).sum());
}

TEST(ExactSum, CallsAddUpAndAnEmptyListAddsNothing) {
  std::vector<float> values(40000);
  fill_by_blocks(values.data(), 40000, 6);
  Sum sum(kExactNumel);
  add_squares_exactly({}, sum.data(), Stream{});
  EXPECT_EQ(sum, Sum(kExactNumel));
  for (int64_t begin = 0; begin < 40000; begin += 2560) {
    const int64_t numel = std::min<int64_t>(2560, 40000 - begin);
    add_squares_exactly(ConstSpan{values.data() + begin, numel}, sum.data(), Stream{});
    add_squares_exactly({}, sum.data(), Stream{});
  }
  EXPECT_EQ(sum, sum_of(ConstSpan{values.data(), 40000}));
}

TEST(ExactSum, ManyLargestValuesAddUp) {
  const std::vector<float> values(1 << 20, kLargest);
  const ConstSpan span{values.data(), 1 << 20};
  Sum sum(kExactNumel);
  Bits expected;
  for (int i = 0; i < 10; ++i) {
    add_squares_exactly(std::vector<ConstSpan>(i, span), sum.data(), Stream{});
    for (int64_t block = 0; block < i * 4096; ++block) expected.add(sum_of_block(span.data, 256));
  }
  EXPECT_EQ(sum, expected.sum());
  EXPECT_EQ(value_of(sum), 45.0 * (1 << 20) * (double{kLargest} * kLargest));
}

TEST(ExactSum, ExtremesAreExact) {
  const auto value = [](const std::vector<float>& values) {
    return value_of(sum_of(ConstSpan{values.data(), static_cast<int64_t>(values.size())}));
  };
  EXPECT_EQ(double_bits(value({})), double_bits(0.0));
  EXPECT_EQ(double_bits(value({0.0F, -0.0F})), double_bits(0.0));
  EXPECT_EQ(value({kSmallest}), 0x1p-298);
  EXPECT_EQ(value({-kSmallest, kSmallest, 2.0F * kSmallest}), 6.0 * 0x1p-298);
  EXPECT_EQ(value(std::vector<float>(257, kLargest)), 257.0 * (double{kLargest} * kLargest));
  std::vector<float> both(512, 0.0F);
  both[0] = -kLargest;
  both[256] = kSmallest;
  const Sum sum = sum_of(ConstSpan{both.data(), 512});
  EXPECT_EQ(sum[0], 1);
  EXPECT_EQ(value_of(sum), double{kLargest} * kLargest);
}

TEST(ExactSum, LimbsOfRanksAddUpInDouble) {
  constexpr int64_t kBlocks = 240;
  std::vector<float> values(kBlocks * 256);
  for (const auto& fill : {fill_finite, fill_by_blocks}) {
    fill(values.data(), kBlocks * 256, 7);
    const double expected = value_of(sum_of(ConstSpan{values.data(), kBlocks * 256}));
    for (int64_t world = 1; world <= 8; ++world) {
      std::vector<double> total(kExactNumel);
      for (int64_t rank = 0; rank < world; ++rank) {
        std::vector<ConstSpan> spans;
        for (int64_t block = rank; block < kBlocks; block += world) {
          spans.push_back({values.data() + block * 256, 256});
        }
        const Sum of_rank = sum_of(spans);
        for (int64_t i = 0; i < kExactNumel; ++i) total[i] += static_cast<double>(of_rank[i]);
      }
      const Sum sum(total.begin(), total.end());
      ASSERT_EQ(double_bits(value_of(sum)), double_bits(expected)) << world << " ranks";
    }
  }
}

TEST(ExactSum, ValuesThatAreNotFiniteAreCountedAndTheirBlocksAddNothing) {
  constexpr int64_t kNumel = 50000;
  std::vector<float> values(kNumel);
  fill_ordinary(values.data(), kNumel, 8);
  std::vector<float> without = values;
  const float nan = std::nanf("");
  const std::vector<std::pair<int64_t, float>> bad = {
      {0, kInfinity},      {1, -kInfinity}, {16383, nan}, {16384, kInfinity},
      {16640, -nan},       {16700, nan},    {16701, nan}, {33000, kInfinity},
      {33001, -kInfinity}, {33002, nan},    {49999, nan}};
  for (const auto& [i, x] : bad) {
    values[i] = x;
    std::fill_n(without.begin() + i / 256 * 256, std::min<int64_t>(256, kNumel - i / 256 * 256),
                0.0F);
  }
  Sum expected = sum_of(ConstSpan{without.data(), kNumel});
  expected[kExactLimbs] = 5;
  expected[kExactLimbs + 1] = 6;
  for_each_setting([&] { ASSERT_EQ(sum_of(ConstSpan{values.data(), kNumel}), expected); });
}

TEST(ValueOfExactSum, NanIsAboveInfinityAndInfinityAboveNumbers) {
  Sum sum(kExactNumel, 5);
  sum[kExactLimbs] = sum[kExactLimbs + 1] = 0;
  EXPECT_TRUE(std::isfinite(value_of(sum)));
  sum[kExactLimbs] = 1;
  EXPECT_EQ(value_of(sum), std::numeric_limits<double>::infinity());
  sum[kExactLimbs + 1] = int64_t{1} << 53;
  EXPECT_TRUE(std::isnan(value_of(sum)));
  sum[kExactLimbs] = 0;
  EXPECT_TRUE(std::isnan(value_of(sum)));
}

TEST(ValueOfExactSum, EveryRoundingIsToNearestEven) {
  std::mt19937 generator(9);
  // What there is below the 53 bits of a double: nothing, less than half, half, more than half.
  for (int64_t top = 0; top < 32 * kExactLimbs + 20; ++top) {
    for (int i = 0; i < 16; ++i) {
      Bits bits;
      bits.add_bit(top);
      for (int64_t bit = top - 1; bit >= std::max<int64_t>(0, top - 51); --bit) {
        if (generator() % 2 == 0 || i >= 12) bits.add_bit(bit);
      }
      if (top >= 52 && i % 2 == 0) bits.add_bit(top - 52);
      if (top >= 53 && i / 2 % 2 == 0) bits.add_bit(top - 53);
      if (top >= 54 && i / 4 % 2 == 0) bits.add_bit(generator() % (top - 53));
      ASSERT_EQ(double_bits(value_of(bits.sum())), double_bits(bits.value()))
          << "highest bit " << top << ", case " << i;
    }
  }
}

// The same number, with what belongs into a limb still in the one below it.
TEST(ValueOfExactSum, LimbsThatWereNotCarriedHaveTheSameBits) {
  std::mt19937_64 generator(10);
  for (int i = 0; i < 2000; ++i) {
    Bits bits;
    const int64_t top = static_cast<int64_t>(generator() % (32 * kExactLimbs));
    for (int64_t bit = std::max<int64_t>(0, top - 120); bit <= top; ++bit) {
      if (generator() % 3 != 0) bits.add_bit(bit);
    }
    Sum sum = bits.sum();
    for (int64_t limb = kExactLimbs - 1; limb > 0; --limb) {
      const auto taken = static_cast<int64_t>(
          generator() % static_cast<uint64_t>(std::min(sum[limb], int64_t{1} << 20) + 1));
      sum[limb] -= taken;
      sum[limb - 1] += taken << 32;
    }
    ASSERT_EQ(double_bits(value_of(sum)), double_bits(bits.value())) << "number " << i;
  }
}

TEST(ValueOfExactSum, LargestLimbsAreNotLost) {
  Sum sum(kExactNumel);
  for (int64_t i = 0; i < kExactLimbs; ++i) sum[i] = int64_t{1} << 53;
  Bits bits;
  for (int64_t i = 0; i < kExactLimbs; ++i) bits.add_bit(32 * i + 53);
  EXPECT_EQ(double_bits(value_of(sum)), double_bits(bits.value()));
}

TEST(ExactSum, RefusesNullPointersAndSpansWithoutEnd) {
  const float value = 1.0F;
  Sum sum(kExactNumel);
  double result = 0.0;
  const auto add = [&](const ConstSpan& span) { add_squares_exactly(span, sum.data(), Stream{}); };
  EXPECT_THROW(add_squares_exactly({}, nullptr, Stream{}), c10::Error);
  EXPECT_THROW(add({nullptr, 1}), c10::Error);
  EXPECT_THROW(add({&value, -1}), c10::Error);
  EXPECT_THROW(add({&value, (int64_t{1} << 38) + 1}), c10::Error);
  EXPECT_THROW(add({&value, std::numeric_limits<int64_t>::max()}), c10::Error);
  const std::vector<ConstSpan> many(1 << 16, ConstSpan{&value, (1 << 22) + 1});
  EXPECT_THROW(add_squares_exactly(many, sum.data(), Stream{}), c10::Error);
  EXPECT_THROW(value_of_exact_sum(nullptr, &result, Stream{}), c10::Error);
  EXPECT_THROW(value_of_exact_sum(sum.data(), nullptr, Stream{}), c10::Error);
  EXPECT_EQ(sum, Sum(kExactNumel));
}

}  // namespace
}  // namespace zero::kernels
