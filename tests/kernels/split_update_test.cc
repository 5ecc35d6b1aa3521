// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// adam_step, sgd_step and lion_step of split masters against the same updates of fp32 masters: the
// same bits after several steps, for every type of state, size and alignment.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/kernels/update_arrays.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

const std::vector<int64_t> kNumels = {0, 1, 255, 256, 257, 1000, 50000};
constexpr auto kDtype = ScalarType::BFloat16;

Arrays split_arrays(StateType type, int64_t numel, int64_t offset) {
  return {type, numel, kDtype, offset, /*split=*/true};
}

// The same arrays with an fp32 master.
template <class Rule>
auto plain_segment(Arrays& arrays, int variant) {
  auto segment = Rule::segment(arrays, variant);
  segment.master = arrays.master.template as<float>();
  segment.remainder = nullptr;
  return segment;
}

template <class Rule, class Segments>
void update(const Segments& segments, int variant, int64_t step, const double* nonfinite = nullptr,
            ScalarType dtype = kDtype) {
  const float coefficient = 0.37F;
  Rule::step(segments, Rule::options(variant, step), &coefficient, nonfinite, dtype, Stream{});
}

std::vector<float> joined(Arrays& arrays) {
  std::vector<float> values(static_cast<size_t>(arrays.numel));
  join_halves(arrays.working.as<void>(), arrays.remainder.as<int16_t>(), arrays.numel,
              values.data(), Stream{});
  return values;
}

// Whether the halves in `split` have the bits of the fp32 master. A NaN has no particular bits, but
// its upper half is one too.
bool has_master_of(Arrays& split, Arrays& plain) {
  const std::vector<float> values = joined(split);
  for (size_t i = 0; i < values.size(); ++i) {
    const float expected = plain.master.as<float>()[i];
    if (std::isnan(expected)) {
      const bool is_nan = (split.working.as<uint16_t>()[i] & 0x7fff) > 0x7f80;
      if (!is_nan || !std::isnan(values[i])) return false;
    } else if (std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(expected)) {
      return false;
    }
  }
  return true;
}

template <class Rule>
class SplitUpdate : public ::testing::Test {};
TYPED_TEST_SUITE(SplitUpdate, Rules);

TYPED_TEST(SplitUpdate, HasTheBitsOfFp32Masters) {
  using Rule = TypeParam;
  for (const StateType type : kStateTypes) {
    for (const int64_t numel : kNumels) {
      for (int variant = 0; variant < Rule::kVariants; ++variant) {
        if (numel > 1100 && variant + 1 != Rule::kVariants && variant != 2) continue;
        const Arrays start = split_arrays(type, numel, variant % 3);
        Arrays plain = start;
        for (int64_t step = 0; step < 3; ++step) {
          update<Rule>(plain_segment<Rule>(plain, variant), variant, step);
        }
        for_each_setting([&] {
          Arrays split = start;
          for (int64_t step = 0; step < 3; ++step) {
            update<Rule>(Rule::segment(split, variant), variant, step);
          }
          ASSERT_TRUE(has_master_of(split, plain))
              << "type " << static_cast<int>(type) << " numel " << numel << " variant " << variant;
          ASSERT_TRUE(split.same_others(plain))
              << "type " << static_cast<int>(type) << " numel " << numel << " variant " << variant;
          ASSERT_TRUE(split.master.same_bytes(start.master));
          ASSERT_TRUE(split.guards_intact());
        });
      }
    }
  }
}

// All alignments of arrays whose elements have 2 and 4 bytes, against each other.
TYPED_TEST(SplitUpdate, SegmentsOfAllKindsAndAlignmentsInOneCall) {
  using Rule = TypeParam;
  std::vector<Arrays> start;
  for (int64_t i = 0; i < 60; ++i) {
    start.push_back(split_arrays(kStateTypes[i % 3], i == 4 ? 40000 : i * 37 % 700, i % 8));
  }
  std::vector<Arrays> plain = start;
  for (Arrays& arrays : plain) update<Rule>(plain_segment<Rule>(arrays, 0), 0, 5);
  for_each_setting([&] {
    std::vector<Arrays> split = start;
    std::vector<decltype(Rule::segment(split[0], 0))> segments;
    for (size_t i = 0; i < split.size(); ++i) {
      segments.push_back(i % 4 == 1 ? plain_segment<Rule>(split[i], 0)
                                    : Rule::segment(split[i], 0));
    }
    update<Rule>(segments, 0, 5);
    for (size_t i = 0; i < split.size(); ++i) {
      EXPECT_TRUE(split[i].same_others(plain[i])) << "segment " << i;
      if (i % 4 == 1) {
        EXPECT_TRUE(split[i].same_bytes(plain[i])) << "segment " << i;
      } else {
        EXPECT_TRUE(has_master_of(split[i], plain[i])) << "segment " << i;
      }
    }
  });
}

TYPED_TEST(SplitUpdate, MastersThatAreNotFiniteStaySo) {
  using Rule = TypeParam;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const StateType type : kStateTypes) {
    for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      Arrays plain = split_arrays(type, 600, 0);
      plain.master.as<float>()[300] = bad;
      plain.split_master();
      const Arrays start = plain;
      for (int64_t step = 0; step < 2; ++step) {
        update<Rule>(plain_segment<Rule>(plain, 2), 2, step);
      }
      for_each_setting([&] {
        Arrays split = start;
        for (int64_t step = 0; step < 2; ++step) {
          update<Rule>(Rule::segment(split, 2), 2, step);
        }
        EXPECT_TRUE(has_master_of(split, plain)) << bad;
        EXPECT_FALSE(std::isfinite(joined(split)[300]));
        EXPECT_TRUE(std::isfinite(joined(split)[104]));  // of another block
      });
    }
  }
}

// Rounded as a number, its upper half is that of a zero.
TYPED_TEST(SplitUpdate, AGradientThatIsANanOfOnesMakesNoZeroOfAWorkingValue) {
  using Rule = TypeParam;
  for (const StateType type : kStateTypes) {
    for (const uint32_t bits : {0x7fffffffU, 0xffffffffU}) {
      for (int variant = 0; variant < Rule::kVariants; ++variant) {
        Arrays plain = split_arrays(type, 600, 0);
        // In each half of sixteen elements.
        for (const int64_t at : {292, 316})
          plain.gradient.as<float>()[at] = std::bit_cast<float>(bits);
        const Arrays start = plain;
        update<Rule>(plain_segment<Rule>(plain, variant), variant, 0);
        for_each_setting([&] {
          Arrays split = start;
          update<Rule>(Rule::segment(split, variant), variant, 0);
          EXPECT_TRUE(has_master_of(split, plain)) << "variant " << variant;
        });
      }
    }
  }
}

TYPED_TEST(SplitUpdate, RefusesWhatItCannotDo) {
  using Rule = TypeParam;
  const Arrays before = split_arrays(StateType::kFloat, 1000, 0);
  Arrays arrays = before;
  const auto good = Rule::segment(arrays, 0);
  for (const ScalarType dtype : {ScalarType::Float, ScalarType::Half}) {
    EXPECT_THROW(update<Rule>(good, 0, 1, nullptr, dtype), c10::Error);
  }
  auto bad = good;
  bad.working = nullptr;
  EXPECT_THROW(update<Rule>(bad, 0, 1), c10::Error);
  bad = good;
  bad.master = arrays.master.template as<float>();
  EXPECT_THROW(update<Rule>(bad, 0, 1), c10::Error);
  bad = good;
  bad.gradient = nullptr;
  EXPECT_THROW(update<Rule>(bad, 0, 1), c10::Error);
  bad = good;
  bad.remainder = nullptr;
  EXPECT_THROW(update<Rule>(bad, 0, 1), c10::Error);
  EXPECT_TRUE(arrays.same_bytes(before));
}

}  // namespace
}  // namespace zero::kernels
