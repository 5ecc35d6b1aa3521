// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// adam_step, sgd_step, lion_step and ema_step against their scalar definitions: equal bits in every
// setting, for every dtype, type of state, size and alignment, and however a parameter is cut.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <string>
#include <vector>

#include "kernels/ema.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/update_arrays.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

constexpr StateType kStored[] = {StateType::kBFloat16, StateType::kInt8};

Arrays plain_arrays(int64_t numel, ScalarType working_dtype, int64_t offset) {
  return {StateType::kFloat, numel, working_dtype, offset};
}

template <class Rule>
class Updates : public ::testing::Test {};
TYPED_TEST_SUITE(Updates, Rules);

TYPED_TEST(Updates, EveryVariantSizeAndSettingHasTheBitsOfTheReference) {
  using Rule = TypeParam;
  const float coefficient = 0.37F;
  constexpr ScalarType kDtypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  for (const StateType type : kStateTypes) {
    for (const int64_t numel : kSizes) {
      for (int variant = 0; variant < 3 * Rule::kVariants; ++variant) {
        const int options = variant % Rule::kVariants;
        // The threads' shares are the same for every variant; the last one of SGD has no momentum.
        if (numel > 1100 && options + 1 != Rule::kVariants && options != 2) continue;
        if (type != StateType::kFloat && variant >= Rule::kVariants) continue;
        const ScalarType dtype = kDtypes[(variant + variant / Rule::kVariants) % 3];
        const Arrays start(type, numel, dtype, variant % 3);
        Arrays expected = start;
        const float* scale = variant % 5 == 4 ? nullptr : &coefficient;
        for (int64_t step = 0; step < 2; ++step) {
          Rule::expect(Rule::segment(expected, options), Rule::options(options, step), scale,
                       dtype);
        }
        for_each_setting([&] {
          Arrays got = start;
          for (int64_t step = 0; step < 2; ++step) {
            Rule::step(Rule::segment(got, options), Rule::options(options, step), scale, nullptr,
                       dtype, Stream{});
          }
          ASSERT_TRUE(got.same_others(expected)) << "variant " << variant;
          ASSERT_TRUE(got.same_bytes(expected))
              << "type " << static_cast<int>(type) << " numel " << numel << " variant " << variant;
          ASSERT_TRUE(got.guards_intact());
        });
      }
    }
  }
}

// Segments of all types in one call, with their own parameters, lengths, places and step counts;
// some have no working array, or that of the master.
TYPED_TEST(Updates, SegmentsOfSeveralTypesAndParameters) {
  using Rule = TypeParam;
  const float device_step = 5.0F;
  std::vector<Arrays> expected;
  for (int64_t i = 0; i < 90; ++i) {
    expected.emplace_back(kStateTypes[i % 3], i == 3 || i == 4 ? 40000 : i * 37 % 700,
                          ScalarType::BFloat16, i % 4);
    expected.back().parameter = i / 3;
    expected.back().element = i % 5 * 256;
    expected.back().step = i + 1;
  }
  const std::vector<Arrays> start = expected;
  const auto segment_of = [&](Arrays& arrays, size_t i) {
    auto segment = Rule::segment(arrays, 0);
    if (i % 4 == 1) segment.working = segment.master;
    if (i % 4 == 2) segment.working = nullptr;
    if constexpr (requires { segment.device_step; }) {
      if (i % 5 == 0) segment.device_step = &device_step;
    }
    return segment;
  };
  for (size_t i = 0; i < start.size(); ++i) {
    Rule::expect(segment_of(expected[i], i), Rule::options(0, 5), nullptr, ScalarType::BFloat16);
  }
  auto options = Rule::options(0, 17);  // not looked at
  const double step = 5.0;
  options.device_noise_step = &step;
  for_each_setting([&] {
    std::vector<Arrays> got = start;
    std::vector<decltype(Rule::segment(got[0], 0))> segments;
    for (size_t i = 0; i < got.size(); ++i) segments.push_back(segment_of(got[i], i));
    Rule::step(segments, options, nullptr, nullptr, ScalarType::BFloat16, Stream{});
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(got[i].same_bytes(expected[i])) << "segment " << i;
    }
  });
}

TYPED_TEST(Updates, GradientsWhoseSecondMomentsOverflow) {
  using Rule = TypeParam;
  for (const StateType type : kStored) {
    Arrays start(type, 1000, ScalarType::BFloat16, 0);
    start.gradient.template as<float>()[300] = 1e25F;
    Arrays expected = start;
    Rule::expect(Rule::segment(expected, 0), Rule::options(0, 1), nullptr, ScalarType::BFloat16);
    for_each_setting([&] {
      Arrays got = start;
      Rule::step(Rule::segment(got, 0), Rule::options(0, 1), nullptr, nullptr, ScalarType::BFloat16,
                 Stream{});
      EXPECT_TRUE(got.same_bytes(expected)) << "type " << static_cast<int>(type);
    });
  }
}

// A parameter in three pieces, which begin at blocks, has the bits of the whole one.
TYPED_TEST(Updates, CutsAtBlocksChangeNoBit) {
  using Rule = TypeParam;
  constexpr int64_t kNumel = 4096;
  const int64_t cuts[] = {0, 256, 1792, kNumel};
  const auto cut = [&](StateType type) {
    Arrays whole(type, kNumel, ScalarType::Half, 0);
    std::vector<Arrays> pieces;
    std::vector<decltype(Rule::segment(whole, 0))> segments;
    std::vector<float> values(kNumel);
    for (int k = 0; k < 3; ++k) {
      const int64_t begin = cuts[k], numel = cuts[k + 1] - begin;
      pieces.emplace_back(type, numel, ScalarType::Half, 1);
      Arrays& piece = pieces.back();
      std::memcpy(piece.master.as<float>(), whole.master.as<float>() + begin, 4 * numel);
      std::memcpy(piece.gradient.as<float>(), whole.gradient.as<float>() + begin, 4 * numel);
      std::memcpy(piece.largest.as<float>(), whole.largest.as<float>() + begin, 4 * numel);
      decode_state(type, false, whole.first.as<void>(), kNumel, values.data());
      encode_state(type, false, values.data() + begin, numel, piece.first.as<void>());
      decode_state(type, true, whole.second.as<void>(), kNumel, values.data());
      encode_state(type, true, values.data() + begin, numel, piece.second.as<void>());
      piece.element = whole.element + begin;
    }
    for (Arrays& piece : pieces) segments.push_back(Rule::segment(piece, 0));
    for (int64_t step = 0; step < 3; ++step) {
      Rule::step(Rule::segment(whole, 0), Rule::options(0, step), nullptr, nullptr,
                 ScalarType::Half, Stream{});
      Rule::step(segments, Rule::options(0, step), nullptr, nullptr, ScalarType::Half, Stream{});
    }
    for (int k = 0; k < 3; ++k) {
      const int64_t begin = cuts[k], numel = cuts[k + 1] - begin;
      EXPECT_EQ(
          std::memcmp(pieces[k].master.as<float>(), whole.master.as<float>() + begin, 4 * numel),
          0);
      std::vector<float> piece(static_cast<size_t>(numel));
      for (const bool root : {false, true}) {
        decode_state(type, root, (root ? whole.second : whole.first).as<void>(), kNumel,
                     values.data());
        decode_state(type, root, (root ? pieces[k].second : pieces[k].first).as<void>(), numel,
                     piece.data());
        EXPECT_EQ(std::memcmp(piece.data(), values.data() + begin, 4 * numel), 0)
            << "piece " << k << ", root " << root;
      }
    }
  };
  for (const StateType type : kStored) for_each_setting([&] { cut(type); });
}

TYPED_TEST(Updates, ANonFiniteCountLeavesEveryBitAsItWas) {
  using Rule = TypeParam;
  const float coefficient = NAN;
  for (const StateType type : kStateTypes) {
    for (const bool split : {false, true}) {
      const Arrays before(type, 1000, ScalarType::BFloat16, 1, split);
      for (const double nonfinite : {1.0, 17.0, static_cast<double>(NAN), 0.0}) {
        Arrays arrays = before;
        Rule::step(Rule::segment(arrays, 1), Rule::options(1, 1), &coefficient, &nonfinite,
                   ScalarType::BFloat16, Stream{});
        EXPECT_EQ(arrays.same_bytes(before), nonfinite != 0.0) << nonfinite;
      }
    }
  }
}

// Rounded to bf16 as a number, it is a zero.
TYPED_TEST(Updates, AMasterThatIsANanOfOnesMakesNoZeroOfAWorkingValue) {
  using Rule = TypeParam;
  for (const StateType type : kStateTypes) {
    for_each_setting([&] {
      for (int variant = 0; variant < Rule::kVariants; ++variant) {
        for (const int64_t at : {292, 300}) {  // in each half of sixteen elements
          Arrays arrays(type, 600, ScalarType::BFloat16, 0);
          arrays.master.as<float>()[at] = std::bit_cast<float>(0x7fffffffU);
          Rule::step(Rule::segment(arrays, variant), Rule::options(variant, 1), nullptr, nullptr,
                     ScalarType::BFloat16, Stream{});
          EXPECT_GT(arrays.working.as<uint16_t>()[at] & 0x7fff, 0x7f80) << "variant " << variant;
          EXPECT_LT(arrays.working.as<uint16_t>()[100] & 0x7fff, 0x7f80) << "variant " << variant;
        }
      }
    });
  }
}

// The noise of bf16 would carry into the sign.
TYPED_TEST(Updates, AGradientThatIsANanOfOnesMakesNoZeroOfAMoment) {
  using Rule = TypeParam;
  std::vector<float> moments(600);
  for (const StateType type : kStateTypes) {
    for_each_setting([&] {
      for (const int64_t at : {292, 300}) {
        Arrays arrays(type, 600, ScalarType::BFloat16, 0);
        arrays.gradient.as<float>()[at] = std::bit_cast<float>(0x7fffffffU);
        Rule::step(Rule::segment(arrays, 0), Rule::options(0, 1), nullptr, nullptr,
                   ScalarType::BFloat16, Stream{});
        decode_state(type, false, arrays.first.as<void>(), 600, moments.data());
        EXPECT_TRUE(std::isnan(moments[at])) << "type " << static_cast<int>(type);
        EXPECT_TRUE(std::isfinite(moments[100])) << "type " << static_cast<int>(type);
      }
    });
  }
}

TYPED_TEST(Updates, RefusesElementsAtWhichNoBlockBegins) {
  using Rule = TypeParam;
  for (const StateType type : kStored) {
    Arrays arrays(type, 1000, ScalarType::Float, 0);
    auto segment = Rule::segment(arrays, 0);
    for (const int64_t element : {1, 255, -256, 257}) {
      segment.element = element;
      EXPECT_THROW(
          Rule::step(segment, Rule::options(0, 1), nullptr, nullptr, ScalarType::Float, Stream{}),
          c10::Error);
    }
  }
  Arrays arrays(StateType::kInt8, 1000, ScalarType::Float, 0);
  auto segment = Rule::segment(arrays, 0);
  segment.state_type = static_cast<StateType>(7);
  EXPECT_THROW(
      Rule::step(segment, Rule::options(0, 1), nullptr, nullptr, ScalarType::Float, Stream{}),
      c10::Error);
}

TEST(SgdStep, TheFirstStepDoesNotReadTheMomentum) {
  Arrays arrays = plain_arrays(100, ScalarType::Float, 0);
  std::fill_n(arrays.first.as<float>(), 100, NAN);
  SgdSegment segment = arrays.sgd();
  segment.first_step = true;
  sgd_step(segment, {.momentum = 0.9, .nesterov = true}, nullptr, nullptr, ScalarType::Float,
           Stream{});
  for (int64_t i = 0; i < 100; ++i) {
    ASSERT_TRUE(std::isfinite(arrays.master.as<float>()[i]));
    ASSERT_EQ(arrays.first.as<float>()[i], arrays.gradient.as<float>()[i]);
  }
}

TEST(SgdStep, AStepCountInMemorySaysWhichStepIsTheFirst) {
  const float counts[2] = {1.0F, 2.0F};
  for (const bool first_step : {true, false}) {
    Arrays expected = plain_arrays(100, ScalarType::BFloat16, 1);
    Arrays got = expected;
    SgdSegment segment = expected.sgd();
    segment.first_step = first_step;
    sgd_step(segment, {.momentum = 0.9}, nullptr, nullptr, ScalarType::BFloat16, Stream{});
    segment = got.sgd();
    segment.first_step = !first_step;  // not looked at
    segment.device_step = &counts[first_step ? 0 : 1];
    sgd_step(segment, {.momentum = 0.9}, nullptr, nullptr, ScalarType::BFloat16, Stream{});
    EXPECT_TRUE(got.same_bytes(expected)) << first_step;
  }
}

TEST(SgdStep, WithoutMomentumStateIsNotTouched) {
  Arrays expected(StateType::kInt8, 1000, ScalarType::Float, 0);
  Arrays got = expected;
  reference::stored_sgd_step(expected.sgd(), {.lr = 0.1}, nullptr, ScalarType::Float);
  SgdSegment segment = got.sgd();
  segment.momentum = nullptr;
  sgd_step(segment, {.lr = 0.1}, nullptr, nullptr, ScalarType::Float, Stream{});
  EXPECT_TRUE(got.same_bytes(expected));
}

// Of each update, one with the learning rate by value and one that reads it from memory.
template <class Segment, class Options, class Step>
void expect_rate_from_memory(Segment (Arrays::*segment_of)(), Options options, const Step& step) {
  options.lr = 0.0123;
  options.weight_decay = 0.3;
  const float count = 7.0F;
  Arrays expected = plain_arrays(1000, ScalarType::BFloat16, 0);
  Arrays got = expected;
  const auto run = [&](Arrays& arrays) {
    Segment segment = (arrays.*segment_of)();
    if constexpr (requires { segment.device_step; }) segment.device_step = &count;
    step(segment, options, nullptr, nullptr, ScalarType::BFloat16, Stream{});
  };
  run(expected);
  const double rate = options.lr;
  options.lr = 1.0;
  options.device_lr = &rate;
  run(got);
  EXPECT_TRUE(got.same_bytes(expected));
}

TEST(LearningRate, IsReadFromMemoryWhereItIsGivenThere) {
  const auto adam = [](auto&&... a) { adam_step(a...); };
  expect_rate_from_memory(&Arrays::adam, AdamOptions{.decoupled = true}, adam);
  expect_rate_from_memory(&Arrays::adam, AdamOptions{.decoupled = false}, adam);
  expect_rate_from_memory(&Arrays::sgd, SgdOptions{.momentum = 0.9},
                          [](auto&&... a) { sgd_step(a...); });
  expect_rate_from_memory(&Arrays::lion, LionOptions{}, [](auto&&... a) { lion_step(a...); });
}

TEST(LearningRate, OfAdamInMemoryNeedsTheCountThere) {
  Arrays arrays = plain_arrays(10, ScalarType::Float, 0);
  const double rate = 0.1;
  EXPECT_THROW(
      adam_step(arrays.adam(), {.device_lr = &rate}, nullptr, nullptr, ScalarType::Float, Stream{}),
      c10::Error);
}

EmaSegment ema(Arrays& arrays) {
  return {arrays.first.as<float>(), arrays.master.as<float>(), arrays.numel};
}

TEST(EmaStep, EverySizeAndSettingHasTheBitsOfTheReference) {
  const float weight = 0.0137F;
  for (int64_t numel : kSizes) {
    const Arrays start = plain_arrays(numel, ScalarType::Float, 0);
    Arrays expected = start;
    reference::ema_step(ema(expected), weight);
    for_each_setting([&] {
      Arrays got = start;
      ema_step(ema(got), weight, nullptr, Stream{});
      ASSERT_TRUE(got.same_bytes(expected)) << numel;
      ASSERT_TRUE(got.guards_intact());
      got = start;
      ema_step(ema(got), /*weight=*/1.0F, &weight, Stream{});
      ASSERT_TRUE(got.same_bytes(expected)) << numel << ", a weight by its address";
    });
  }
}

TEST(EmaStep, ManySegments) {
  constexpr int64_t kCount = 60;
  const float weight = 0.25F;
  std::vector<Arrays> got, expected;
  std::vector<EmaSegment> segments;
  for (int64_t i = 0; i < kCount; ++i)
    got.push_back(plain_arrays(i * 7 % 50, ScalarType::Float, 0));
  expected = got;
  for (int64_t i = 0; i < kCount; ++i) {
    segments.push_back(ema(got[i]));
    reference::ema_step(ema(expected[i]), weight);
  }
  ema_step(segments, weight, nullptr, Stream{});
  for (int64_t i = 0; i < kCount; ++i) EXPECT_TRUE(got[i].same_bytes(expected[i])) << i;
}

TEST(EmaStep, AWeightOfZeroWritesNothing) {
  Arrays got = plain_arrays(100, ScalarType::Float, 0);
  got.master.as<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  const Arrays before = got;
  const float none = 0.0F;
  ema_step(ema(got), none, nullptr, Stream{});
  ema_step(ema(got), 0.5F, &none, Stream{});
  EXPECT_TRUE(got.same_bytes(before));
}

TEST(EmaStep, RefusesSegmentsThatHaveNoMemory) {
  Arrays arrays = plain_arrays(10, ScalarType::Float, 0);
  EmaSegment segment = ema(arrays);
  segment.values = nullptr;
  EXPECT_THROW(ema_step(segment, 0.5F, nullptr, Stream{}), c10::Error);
  segment = ema(arrays);
  segment.numel = -1;
  EXPECT_THROW(ema_step(segment, 0.5F, nullptr, Stream{}), c10::Error);
  ema_step(EmaSegment{}, 0.5F, nullptr, Stream{});
}

TEST(Steps, RefuseWhatTheyCannotDo) {
  Arrays arrays = plain_arrays(10, ScalarType::Float, 0);
  AdamSegment adam = arrays.adam();
  EXPECT_THROW(adam_step(adam, {}, nullptr, nullptr, ScalarType::Double, Stream{}), c10::Error);
  adam.step = 0;
  EXPECT_THROW(adam_step(adam, {}, nullptr, nullptr, ScalarType::Float, Stream{}), c10::Error);
  adam = arrays.adam();
  adam.max_exp_avg_sq = nullptr;
  EXPECT_THROW(adam_step(adam, {.amsgrad = true}, nullptr, nullptr, ScalarType::Float, Stream{}),
               c10::Error);
  SgdSegment sgd = arrays.sgd();
  sgd.momentum = nullptr;
  EXPECT_THROW(sgd_step(sgd, {.momentum = 0.9}, nullptr, nullptr, ScalarType::Float, Stream{}),
               c10::Error);
  LionSegment lion = arrays.lion();
  EXPECT_THROW(lion_step(lion, {}, nullptr, nullptr, ScalarType::Double, Stream{}), c10::Error);
  lion.exp_avg = nullptr;
  EXPECT_THROW(lion_step(lion, {}, nullptr, nullptr, ScalarType::Float, Stream{}), c10::Error);
}

}  // namespace
}  // namespace zero::kernels
