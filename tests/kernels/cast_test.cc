// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// cast_copy, cast_copy_spans, round_to_bfloat16 and fill_zero against libtorch's scalar
// conversions.
#include "kernels/cast.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <thread>

#include "tests/kernels/reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

const std::vector<ScalarType> kTypes = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};

float value_at(Buffer& buffer, ScalarType dtype, int64_t i) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return buffer.as<c10::BFloat16>()[i];
    case ScalarType::Half:
      return buffer.as<c10::Half>()[i];
    default:
      return buffer.as<float>()[i];
  }
}

void fill(Buffer& buffer, ScalarType dtype, int64_t numel, uint32_t seed) {
  std::vector<float> values(static_cast<size_t>(numel));
  fill_any_bits(values.data(), numel, seed);
  reference::cast_copy(values.data(), ScalarType::Float, buffer.as<void>(), dtype, numel, nullptr);
}

void expect_equal(Buffer& expected, Buffer& got, ScalarType dtype, int64_t numel) {
  ASSERT_TRUE(got.guards_intact());
  for (int64_t i = 0; i < numel; ++i) {
    const float e = value_at(expected, dtype, i);
    const float g = value_at(got, dtype, i);
    ASSERT_TRUE((std::isnan(e) && std::isnan(g)) ||
                std::bit_cast<uint32_t>(e) == std::bit_cast<uint32_t>(g))
        << "element " << i << ": expected " << e << ", got " << g;
  }
}

TEST(CastCopy, EveryPairOfTypesEverySizeAndSettingMatchesTheReference) {
  for (ScalarType from : kTypes) {
    for (ScalarType to : kTypes) {
      for (int64_t numel : kSizes) {
        for (const std::string added : {"nothing", "the destination", "another array"}) {
          SCOPED_TRACE(std::string(c10::toString(from)) + " to " + c10::toString(to) + ", numel " +
                       std::to_string(numel) + ", adding " + added);
          Buffer source(numel * size_of(from), size_of(from));
          fill(source, from, numel, 1);
          Buffer expected(numel * size_of(to), 0);
          fill(expected, to, numel, 2);
          Buffer start = expected;
          Buffer other(numel * size_of(to), size_of(to));
          fill(other, to, numel, 3);
          const auto addend = [&](Buffer& destination) -> const void* {
            if (added == "nothing") return nullptr;
            return (added == "another array" ? other : destination).as<void>();
          };
          reference::cast_copy(source.as<void>(), from, expected.as<void>(), to, numel,
                               addend(expected));
          for_each_setting([&] {
            for (int64_t offset : {int64_t{0}, size_of(to)}) {
              Buffer got(numel * size_of(to), offset);
              std::memcpy(got.as<char>(), start.as<char>(), static_cast<size_t>(start.bytes()));
              cast_copy(source.as<void>(), from, got.as<void>(), to, numel, addend(got), Stream{});
              expect_equal(expected, got, to, numel);
            }
          });
        }
      }
    }
  }
}

TEST(CastCopy, EveryHalfAndBFloat16SurvivesTheWayThroughFloat) {
  constexpr int64_t kAll = 65536;
  for (ScalarType type : {ScalarType::BFloat16, ScalarType::Half}) {
    Buffer all(2 * kAll, 0);
    for (int64_t i = 0; i < kAll; ++i) {
      all.as<uint16_t>()[i] = static_cast<uint16_t>(i);
    }
    for_each_setting([&] {
      Buffer wide(4 * kAll, 0);
      Buffer back(2 * kAll, 0);
      cast_copy(all.as<void>(), type, wide.as<void>(), ScalarType::Float, kAll, nullptr, Stream{});
      cast_copy(wide.as<void>(), ScalarType::Float, back.as<void>(), type, kAll, nullptr, Stream{});
      for (int64_t i = 0; i < kAll; ++i) {
        const float value = wide.as<float>()[i];
        if (!std::isnan(value)) {
          ASSERT_EQ(all.as<uint16_t>()[i], back.as<uint16_t>()[i]);
          ASSERT_EQ(value, value_at(all, type, i));
        } else {
          ASSERT_TRUE(std::isnan(value_at(back, type, i)));
        }
      }
    });
  }
}

TEST(CastCopy, TheBitsOfNaNDoNotDependOnTheInstructionSet) {
  constexpr int64_t kNumel = 1000;
  Buffer source(4 * kNumel, 0);
  for (int64_t i = 0; i < kNumel; ++i) {
    source.as<uint32_t>()[i] = 0x7f800001U + static_cast<uint32_t>(i) * 8191U + (i % 2 << 31);
  }
  for (ScalarType type : {ScalarType::BFloat16, ScalarType::Half}) {
    std::vector<Buffer> results;
    for_each_setting([&] {
      Buffer got(2 * kNumel, 0);
      cast_copy(source.as<void>(), ScalarType::Float, got.as<void>(), type, kNumel, nullptr,
                Stream{});
      results.push_back(got);
      ASSERT_TRUE(results.front().same_bytes(got));
    });
  }
}

TEST(RoundToBFloat16, HasTheBitsOfACopyToBFloat16AndBack) {
  for (int64_t numel : kSizes) {
    Buffer start(4 * numel, 4);
    fill_any_bits(start.as<float>(), numel, 1);
    Buffer narrow(2 * numel, 0), expected(4 * numel, 4);
    cast_copy(start.as<void>(), ScalarType::Float, narrow.as<void>(), ScalarType::BFloat16, numel,
              nullptr, Stream{});
    cast_copy(narrow.as<void>(), ScalarType::BFloat16, expected.as<void>(), ScalarType::Float,
              numel, nullptr, Stream{});
    for_each_setting([&] {
      Buffer got = start;
      round_to_bfloat16(got.as<float>(), numel);
      ASSERT_TRUE(got.same_bytes(expected)) << numel;
      ASSERT_TRUE(got.guards_intact());
    });
  }
  EXPECT_THROW(round_to_bfloat16(nullptr, 1), c10::Error);
  EXPECT_THROW(round_to_bfloat16(nullptr, -1), c10::Error);
}

TEST(CastCopySpans, MovesEverySpanAndNothingElse) {
  constexpr int64_t kSpans = 300;
  for_each_setting([&] {
    std::vector<Buffer> sources;
    std::vector<Buffer> destinations;
    std::vector<CopySpan> spans;
    for (int64_t i = 0; i < kSpans; ++i) {
      const int64_t numel = i == 7 ? 40000 : i % 50;
      sources.emplace_back(4 * numel, 4 * (i % 3));
      destinations.emplace_back(2 * numel, 2 * (i % 5));
      fill_ordinary(sources.back().as<float>(), numel, static_cast<uint32_t>(i));
    }
    for (int64_t i = 0; i < kSpans; ++i) {
      spans.push_back({sources[i].as<void>(), destinations[i].as<void>(), sources[i].bytes() / 4});
    }
    // First without addends, then with the results as addends.
    for (const bool with_addends : {false, true}) {
      std::vector<Buffer> addends = destinations;
      for (int64_t i = 0; i < kSpans; ++i) spans[i].addend = addends[i].as<void>();
      cast_copy_spans(spans, ScalarType::Float, ScalarType::BFloat16, with_addends, Stream{});
      for (int64_t i = 0; i < kSpans; ++i) {
        Buffer expected(destinations[i].bytes(), 0);
        reference::cast_copy(sources[i].as<void>(), ScalarType::Float, expected.as<void>(),
                             ScalarType::BFloat16, spans[i].numel,
                             with_addends ? spans[i].addend : nullptr);
        ASSERT_TRUE(expected.same_bytes(destinations[i])) << "span " << i;
        ASSERT_TRUE(destinations[i].guards_intact());
      }
    }
  });
}

TEST(CastCopySpans, ManySmallSpansWakeNoThread) {
  constexpr int64_t kSpans = 40;
  const auto threads_of_process = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  std::vector<float> values(2 * kSpans);
  std::vector<CopySpan> spans;
  for (int64_t i = 0; i < kSpans; ++i) spans.push_back({&values[2 * i], &values[2 * i + 1], 1});
  const int threads = at::get_num_threads();
  at::set_num_threads(static_cast<int>(threads_of_process()) + 3);  // one that wakes is a new one
  const auto before = threads_of_process();
  cast_copy_spans(spans, ScalarType::Float, ScalarType::Float, /*with_addends=*/false, Stream{});
  EXPECT_EQ(threads_of_process(), before);
  at::set_num_threads(threads);
}

TEST(CastCopySpans, AnEmptyListIsLegal) {
  cast_copy_spans({}, ScalarType::Float, ScalarType::Half, /*with_addends=*/false, Stream{});
}

TEST(CastCopySpans, AMissingAddendThrows) {
  float values[2] = {1, 2};
  const CopySpan span{values, values + 1, 1};
  EXPECT_THROW(
      cast_copy_spans(span, ScalarType::Float, ScalarType::Float, /*with_addends=*/true, Stream{}),
      c10::Error);
  EXPECT_EQ(values[1], 2);
}

TEST(CastCopy, ThreadsOtherThanTheMainOneMayCall) {
  constexpr int64_t kNumel = 100003;
  Buffer source(4 * kNumel, 0);
  fill_ordinary(source.as<float>(), kNumel, 3);
  std::vector<Buffer> results(2, Buffer(2 * kNumel, 0));
  std::vector<std::thread> threads;
  for (Buffer& result : results) {
    threads.emplace_back([&] {
      cast_copy(source.as<void>(), ScalarType::Float, result.as<void>(), ScalarType::Half, kNumel,
                nullptr, Stream{});
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(static_cast<float>(results[0].as<c10::Half>()[77]),
            static_cast<float>(static_cast<c10::Half>(source.as<float>()[77])));
  EXPECT_TRUE(results[0].same_bytes(results[1]));
}

TEST(FillZero, ClearsExactlyTheBytesGiven) {
  for (int64_t bytes : kSizes) {
    Buffer buffer(bytes, 1);
    fill_zero(buffer.as<void>(), bytes, Stream{});
    Buffer expected(bytes, 0);
    std::memset(expected.as<char>(), 0, static_cast<size_t>(bytes));
    EXPECT_TRUE(buffer.same_bytes(expected));
    EXPECT_TRUE(buffer.guards_intact());
  }
}

TEST(CastCopy, RefusesOtherTypesNegativeSizesAndNullPointers) {
  float x = 0.0F;
  EXPECT_THROW(cast_copy(&x, ScalarType::Double, &x, ScalarType::Float, 1, nullptr, Stream{}),
               c10::Error);
  EXPECT_THROW(cast_copy(&x, ScalarType::Float, &x, ScalarType::Float, -1, nullptr, Stream{}),
               c10::Error);
  EXPECT_THROW(cast_copy(nullptr, ScalarType::Float, &x, ScalarType::Float, 1, nullptr, Stream{}),
               c10::Error);
}

}  // namespace
}  // namespace zero::kernels
