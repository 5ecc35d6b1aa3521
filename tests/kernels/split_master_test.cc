// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// join_halves and split_halves as split_master.h promises them, for all upper halves, and in
// split_master_long_test for all floats.
#include "kernels/split_master.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffU) > 0x7f800000U; }

// torch's cast, for what is not NaN.
uint16_t nearest_even(uint32_t bits) {
  return c10::detail::round_to_nearest_even(std::bit_cast<float>(bits));
}

// Whether a float with these bits may have these halves and may come back with `restored`.
bool is_right(uint32_t bits, uint16_t upper, int16_t lower, uint32_t restored) {
  if (is_nan(bits)) {
    return upper == ((bits >> 16) | 0x40U) && lower == 0 && restored == uint32_t{upper} << 16;
  }
  const int64_t expected = (int64_t{bits} + 32768) / 65536;
  const bool tie = bits % 65536 == 32768;
  return upper == expected && lower == int64_t{bits} - expected * 65536 && restored == bits &&
         (upper == nearest_even(bits) || (tie && upper == nearest_even(bits) + 1));
}

// Splits and joins masters, and returns how many of them are wrong, and one of these.
struct Errors {
  int64_t count = 0;
  uint32_t bits = 0;
};
Errors errors_of(const std::vector<uint32_t>& masters) {
  const auto numel = static_cast<int64_t>(masters.size());
  std::vector<uint16_t> upper(masters.size());
  std::vector<int16_t> lower(masters.size(), 77);
  std::vector<uint32_t> restored(masters.size());
  split_halves(reinterpret_cast<const float*>(masters.data()), numel, upper.data(), lower.data(),
               Stream{});
  join_halves(upper.data(), lower.data(), numel, reinterpret_cast<float*>(restored.data()),
              Stream{});
  Errors errors;
  for (size_t i = 0; i < masters.size(); ++i) {
    if (!is_right(masters[i], upper[i], lower[i], restored[i])) {
      ++errors.count;
      errors.bits = masters[i];
    }
  }
  return errors;
}

TEST(SplitMaster, EveryUpperHalfIsRestoredWithLowerHalvesAroundTies) {
  std::vector<uint32_t> masters;
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      masters.push_back((upper << 16) + lower);
    }
  }
  for_each_setting([&] {
    const Errors errors = errors_of(masters);
    EXPECT_EQ(errors.count, 0) << std::hex << errors.bits;
  });
}

// All 2^32 floats, where ZERO_ALL_FLOATS is set.
TEST(SplitMaster, EveryFloatIsRestored) {
  if (std::getenv("ZERO_ALL_FLOATS") == nullptr) {
    GTEST_SKIP() << "runs in split_master_long_test";
  }
  constexpr uint32_t kPiece = 1U << 14;  // in the cache
  std::vector<uint32_t> masters(kPiece);
  for (const CpuCapability capability : kCpuCapabilities) {
    if (range_kernels_for(capability) == nullptr) continue;
    set_cpu_capability(capability);
    for (uint64_t first = 0; first < uint64_t{1} << 32; first += kPiece) {
      for (uint32_t i = 0; i < kPiece; ++i) masters[i] = static_cast<uint32_t>(first) + i;
      const Errors errors = errors_of(masters);
      ASSERT_EQ(errors.count, 0) << range_kernels().name << ' ' << std::hex << errors.bits;
    }
  }
}

TEST(SplitMaster, AsManyFloatsHaveAnInfiniteUpperHalfAsTheHeaderSays) {
  int64_t count = 0;
  std::vector<uint32_t> masters;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    masters.push_back(0x7f7f0000U + i);
    masters.push_back(0xff7f0000U + i);
  }
  std::vector<uint16_t> upper(masters.size());
  std::vector<int16_t> lower(masters.size());
  split_halves(reinterpret_cast<const float*>(masters.data()), static_cast<int64_t>(masters.size()),
               upper.data(), lower.data(), Stream{});
  for (const uint16_t half : upper) count += (half & 0x7fff) == 0x7f80;
  EXPECT_EQ(count, 65536);
  EXPECT_EQ(errors_of(masters).count, 0);
}

TEST(SplitMaster, EverySizeAndAlignmentIsWrittenWholly) {
  for (const int64_t numel : kSizes) {
    for (const int64_t offset : {0, 1, 3}) {
      Buffer master(4 * numel, 4 * offset), restored(4 * numel, 4 * offset);
      Buffer upper(2 * numel, 2 * offset), lower(2 * numel, 2 * offset);
      fill_ordinary(master.as<float>(), numel, 3);
      for_each_setting([&] {
        split_halves(master.as<float>(), numel, upper.as<void>(), lower.as<int16_t>(), Stream{});
        join_halves(upper.as<void>(), lower.as<int16_t>(), numel, restored.as<float>(), Stream{});
        ASSERT_TRUE(restored.same_bytes(master)) << numel << " elements, offset " << offset;
        ASSERT_TRUE(restored.guards_intact() && upper.guards_intact() && lower.guards_intact());
        std::fill_n(restored.as<char>(), restored.bytes(), char{1});
      });
    }
  }
}

TEST(SplitMaster, RefusesWhatItCannotDo) {
  float master = 0.0F;
  uint16_t upper = 0;
  int16_t lower = 0;
  EXPECT_THROW(split_halves(&master, -1, &upper, &lower, Stream{}), c10::Error);
  EXPECT_THROW(split_halves(nullptr, 1, &upper, &lower, Stream{}), c10::Error);
  EXPECT_THROW(split_halves(&master, 1, nullptr, &lower, Stream{}), c10::Error);
  EXPECT_THROW(split_halves(&master, 1, &upper, nullptr, Stream{}), c10::Error);
  EXPECT_THROW(join_halves(&upper, &lower, -1, &master, Stream{}), c10::Error);
  EXPECT_THROW(join_halves(nullptr, &lower, 1, &master, Stream{}), c10::Error);
  EXPECT_THROW(join_halves(&upper, nullptr, 1, &master, Stream{}), c10::Error);
  EXPECT_THROW(join_halves(&upper, &lower, 1, nullptr, Stream{}), c10::Error);
  split_halves(nullptr, 0, nullptr, nullptr, Stream{});
  join_halves(nullptr, nullptr, 0, nullptr, Stream{});
}

}  // namespace
}  // namespace zero::kernels
