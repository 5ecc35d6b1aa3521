// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Block int8 against plain arithmetic: equal bits in every setting; and its promises: the bound of
// the error, zeros, values that are not finite.
#include "kernels/block_int8.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>

#include "tests/kernels/reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What one rank decodes.
std::vector<float> decoded(const std::vector<float>& x) {
  const auto numel = static_cast<int64_t>(x.size());
  std::vector<float> encoded(static_cast<size_t>(block_int8_bytes(numel) / 4));
  std::vector<float> result(x.size());
  encode_block_int8(x.data(), ScalarType::Float, 1, numel, encoded.data(), Stream{});
  SumBlockInt8Args args;
  args.own = encoded.data();
  args.numel = numel;
  args.shard = result.data();
  sum_block_int8(args, Stream{});
  return result;
}

void expect_bound(const std::vector<float>& x, const std::string& what) {
  const std::vector<float> got = decoded(x);
  for (size_t begin = 0; begin < x.size(); begin += kInt8Block) {
    const size_t end = std::min(x.size(), begin + kInt8Block);
    double largest = 0;
    for (size_t i = begin; i < end; ++i) largest = std::max<double>(largest, std::fabs(x[i]));
    const double bound = largest / 254 + largest * 0x1p-22 + 0x1p-143;
    for (size_t i = begin; i < end; ++i) {
      ASSERT_LE(std::fabs(static_cast<double>(got[i]) - x[i]), bound)
          << what << ": element " << i << " of " << x.size() << " is " << x[i];
      if (x[i] == 0.0F) {
        ASSERT_EQ(got[i], 0.0F) << what;
      }
    }
  }
}

TEST(BlockInt8, RowsHaveAScaleForEachBlockAndAByteForEachValue) {
  EXPECT_EQ(block_int8_bytes(0), 0);
  EXPECT_EQ(block_int8_bytes(1), 4 + 4);
  EXPECT_EQ(block_int8_bytes(256), 4 + 256);
  EXPECT_EQ(block_int8_bytes(257), 8 + 260);
  EXPECT_EQ(block_int8_bytes(1 << 20), (1 << 20) + (1 << 14));
}

TEST(BlockInt8, EncodingMatchesTheReferenceInEverySizeTypeAndSetting) {
  for (ScalarType dtype : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}) {
    for (int64_t numel : kSizes) {
      for (int64_t rows : {1, 3}) {
        for (bool any_bits : {false, true}) {
          std::vector<float> values(static_cast<size_t>(rows * numel));
          any_bits ? fill_any_bits(values.data(), rows * numel, 3)
                   : fill_ordinary(values.data(), rows * numel, 4);
          Buffer source(rows * numel * size_of(dtype), size_of(dtype));
          reference::cast_copy(values.data(), ScalarType::Float, source.as<void>(), dtype,
                               rows * numel, nullptr);
          Buffer expected(rows * block_int8_bytes(numel), 4);
          reference::encode_block_int8(source.as<void>(), dtype, rows, numel, expected.as<void>());
          for_each_setting([&] {
            Buffer got(rows * block_int8_bytes(numel), 4);
            encode_block_int8(source.as<void>(), dtype, rows, numel, got.as<void>(), Stream{});
            ASSERT_TRUE(got.same_bytes(expected)) << c10::toString(dtype) << " numel " << numel;
            ASSERT_TRUE(got.guards_intact());
          });
        }
      }
    }
  }
}

TEST(BlockInt8, SumsMatchTheReferenceInEveryWorldAndSetting) {
  for (int64_t world : {1, 2, 3, 5}) {
    for (int64_t own_rank : {int64_t{0}, world - 1}) {
      for (int64_t numel : kSizes) {
        if (numel > 17000 && world > 3) continue;
        const int64_t bytes = block_int8_bytes(numel);
        std::vector<float> values(static_cast<size_t>(world * numel));
        fill_ordinary(values.data(), world * numel, 5, 300.0F);
        Buffer received(world * bytes, 4);
        reference::encode_block_int8(values.data(), ScalarType::Float, world, numel,
                                     received.as<void>());
        Buffer own(bytes, 8);
        // What is in the own row's place is not read.
        std::memcpy(own.as<char>(), received.as<char>() + own_rank * bytes,
                    static_cast<size_t>(bytes));
        std::memset(received.as<char>() + own_rank * bytes, 0xff, static_cast<size_t>(bytes));
        SumBlockInt8Args args;
        args.received = received.as<void>();
        args.own = own.as<void>();
        args.world_size = world;
        args.own_rank = own_rank;
        args.numel = numel;
        args.scale = 1.0F / static_cast<float>(world);
        std::vector<const void*> addresses;
        for (int64_t r = 0; r < world; ++r) {
          addresses.push_back(r == own_rank ? own.as<char>() : received.as<char>() + r * bytes);
        }
        SumBlockInt8Args in_place = args;
        in_place.rows = addresses.data();
        in_place.received = in_place.own = nullptr;
        for (bool accumulate : {false, true}) {
          Buffer start(4 * numel, 4);
          fill_ordinary(start.as<float>(), numel, 6);
          Buffer expected = start;
          args.accumulate = in_place.accumulate = accumulate;
          args.shard = expected.as<float>();
          reference::sum_block_int8(args);
          for_each_setting([&] {
            for (SumBlockInt8Args now : {args, in_place}) {
              Buffer got = start;
              now.shard = got.as<float>();
              sum_block_int8(now, Stream{});
              ASSERT_TRUE(got.same_bytes(expected)) << "world " << world << " numel " << numel;
              ASSERT_TRUE(got.guards_intact());
            }
          });
        }
      }
    }
  }
}

TEST(BlockInt8, ErrorIsWithinOnePartIn254OfTheLargestOfItsBlock) {
  for (int64_t numel : kSizes) {
    std::vector<float> x(static_cast<size_t>(numel));
    fill_ordinary(x.data(), numel, 7);
    expect_bound(x, "ordinary");
    // Blocks of all magnitudes, from subnormal numbers to the largest ones.
    for (int64_t i = 0; i < numel; ++i) {
      x[i] = std::ldexp(x[i] / 8, static_cast<int>(i / kInt8Block * 37 % 278) - 149);
    }
    expect_bound(x, "all magnitudes");
    // One outlier in each block, and zeros.
    for (int64_t i = 0; i < numel; ++i)
      x[i] = i % kInt8Block == 11 ? -1e20F : i % 3 == 0 ? 0 : x[i];
    expect_bound(x, "outliers");
  }
  // The bound is tight: halfway between two steps.
  EXPECT_NEAR(decoded({127.0F, 0.5F})[1], 0.0, 1e-6);
  EXPECT_NEAR(decoded({127.0F, 1.5F})[1], 2.0, 1e-6);
}

TEST(BlockInt8, SubnormalBlocksKeepTheBound) {
  constexpr float kSmallest = std::numeric_limits<float>::denorm_min();
  for (int largest = 0; largest < 1000; ++largest) {
    std::vector<float> x;
    for (int i = -largest; i <= largest && x.size() < 256; i += 1 + largest / 128) {
      x.push_back(static_cast<float>(i) * kSmallest);
    }
    x.push_back(static_cast<float>(largest) * kSmallest);
    expect_bound(x, "subnormal");
  }
}

TEST(BlockInt8, TheLargestFiniteNumbersStayFinite) {
  float x = std::numeric_limits<float>::max();
  for (int i = 0; i < 1000; ++i) {
    expect_bound({x, -x, x / 3}, "largest");
    EXPECT_TRUE(std::isfinite(decoded({x})[0]));
    x = std::nextafter(x, 0.0F);
  }
}

TEST(BlockInt8, ZerosAreZeros) {
  const std::vector<float> got = decoded(std::vector<float>(1000, 0.0F));
  EXPECT_EQ(got, std::vector<float>(1000, 0.0F));
  std::vector<float> x(513, -0.0F);
  x[300] = 1.0F;
  expect_bound(x, "zeros beside a one");
  EXPECT_EQ(decoded(x)[300], 1.0F);
}

TEST(BlockInt8, AValueThatIsNotFiniteMakesItsBlockNaNAndNoOther) {
  for (float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    for (size_t place : {0, 255, 256, 400, 511, 512, 599}) {
      std::vector<float> x(600);
      fill_ordinary(x.data(), 600, 9);
      x[place] = bad;
      for_each_setting([&] {
        const std::vector<float> got = decoded(x);
        for (size_t i = 0; i < x.size(); ++i) {
          ASSERT_EQ(std::isnan(got[i]), i / 256 == place / 256) << i << " beside " << place;
        }
      });
    }
  }
}

TEST(BlockInt8, RefusesOtherTypesNegativeSizesAndOtherMemory) {
  float x = 0.0F;
  float row[2] = {};
  EXPECT_THROW(encode_block_int8(&x, ScalarType::Int, 1, 1, row, Stream{}), c10::Error);
  EXPECT_THROW(encode_block_int8(&x, ScalarType::Float, 1, -1, row, Stream{}), c10::Error);
  EXPECT_THROW(encode_block_int8(nullptr, ScalarType::Float, 1, 1, row, Stream{}), c10::Error);
  SumBlockInt8Args args;
  args.own = row;
  args.shard = &x;
  args.numel = 1;
  args.own_rank = 1;
  EXPECT_THROW(sum_block_int8(args, Stream{}), c10::Error);
  args.own_rank = 0;
  sum_block_int8(args, Stream{});
  for (const bool encode : {true, false}) {
    try {
      const Stream stream{true, nullptr};
      encode ? encode_block_int8(&x, ScalarType::Float, 1, 1, row, stream)
             : sum_block_int8(args, stream);
      ADD_FAILURE() << "expected an error";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("reduce_dtype"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace zero::kernels
