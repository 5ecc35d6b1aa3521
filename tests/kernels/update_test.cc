// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// adam_step, sgd_step, lion_step and ema_step against their scalar definitions: equal bits in every
// setting, for every working dtype, size and alignment.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "kernels/adam.h"
#include "kernels/ema.h"
#include "kernels/lion.h"
#include "kernels/sgd.h"
#include "tests/kernels/reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

// The arrays of one segment; copies are independent.
struct Arrays {
  Arrays(int64_t numel, ScalarType working_dtype, int64_t offset)
      : numel(numel),
        master(4 * numel, 4 * offset),
        first(4 * numel, 4 * offset),
        second(4 * numel, 4 * offset),
        largest(4 * numel, 4 * offset),
        gradient(4 * numel, 4 * offset),
        working(numel * size_of(working_dtype), offset * size_of(working_dtype)) {
    fill_ordinary(master.as<float>(), numel, 1);
    fill_ordinary(first.as<float>(), numel, 2, 1e-2F);
    fill_ordinary(second.as<float>(), numel, 3, 1e-4F);
    fill_ordinary(gradient.as<float>(), numel, 4, 1e-2F);
    for (int64_t i = 0; i < numel; ++i) {
      second.as<float>()[i] = std::fabs(second.as<float>()[i]);
      largest.as<float>()[i] = second.as<float>()[i] * static_cast<float>(i % 3);
    }
  }

  AdamSegment adam() {
    AdamSegment segment;
    segment.master = master.as<float>();
    segment.exp_avg = first.as<float>();
    segment.exp_avg_sq = second.as<float>();
    segment.max_exp_avg_sq = largest.as<float>();
    segment.gradient = gradient.as<float>();
    segment.working = working.as<void>();
    segment.numel = numel;
    segment.step = 7;
    return segment;
  }
  SgdSegment sgd() {
    SgdSegment segment;
    segment.master = master.as<float>();
    segment.momentum = first.as<float>();
    segment.gradient = gradient.as<float>();
    segment.working = working.as<void>();
    segment.numel = numel;
    return segment;
  }
  LionSegment lion() {
    return {master.as<float>(), first.as<float>(), gradient.as<float>(), working.as<void>(), numel};
  }

  EmaSegment ema() { return {first.as<float>(), master.as<float>(), numel}; }

  bool same_bytes(const Arrays& other) const {
    return master.same_bytes(other.master) && first.same_bytes(other.first) &&
           second.same_bytes(other.second) && largest.same_bytes(other.largest) &&
           gradient.same_bytes(other.gradient) && working.same_bytes(other.working);
  }
  bool guards_intact() const {
    return master.guards_intact() && first.guards_intact() && second.guards_intact() &&
           largest.guards_intact() && gradient.guards_intact() && working.guards_intact();
  }

  int64_t numel;
  Buffer master, first, second, largest, gradient, working;
};

const std::vector<ScalarType> kWorkingTypes = {ScalarType::Float, ScalarType::BFloat16,
                                               ScalarType::Half};

TEST(AdamStep, EveryVariantSizeAndSettingHasTheBitsOfTheReference) {
  const float coefficient = 0.37F;
  for (ScalarType dtype : kWorkingTypes) {
    for (int64_t numel : kSizes) {
      for (int variant = 0; variant < 8; ++variant) {
        if (numel > 1100 && variant != 7) {
          continue;  // the threads' shares are the same for every variant
        }
        AdamOptions options{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6};
        options.amsgrad = (variant & 1) != 0;
        options.decoupled = (variant & 2) != 0;
        options.weight_decay = (variant & 4) != 0 ? 0.1 : 0.0;
        const Arrays start(numel, dtype, variant % 2);
        Arrays expected = start;
        reference::adam_step(expected.adam(), options, &coefficient, nullptr, dtype);
        for_each_setting([&] {
          Arrays got = start;
          adam_step(got.adam(), options, &coefficient, nullptr, dtype, Stream{});
          ASSERT_TRUE(got.same_bytes(expected))
              << c10::toString(dtype) << " numel " << numel << " variant " << variant;
          ASSERT_TRUE(got.guards_intact());
        });
      }
    }
  }
}

TEST(AdamStep, SegmentsWithTheirOwnStepCountsAndLengths) {
  constexpr int64_t kCount = 70;
  const float device_step = 5.0F;
  std::vector<Arrays> expected;
  std::vector<Arrays> got;
  for (int64_t i = 0; i < kCount; ++i) {
    expected.emplace_back(i == 3 ? 40000 : i * 3 % 50, ScalarType::BFloat16, i % 4);
  }
  got = expected;
  const auto segments_of = [&](std::vector<Arrays>& arrays) {
    std::vector<AdamSegment> segments;
    for (int64_t i = 0; i < kCount; ++i) {
      segments.push_back(arrays[i].adam());
      segments.back().step = i + 1;
      segments.back().device_step = i % 5 == 0 ? &device_step : nullptr;
    }
    return segments;
  };
  reference::adam_step(segments_of(expected), {}, nullptr, nullptr, ScalarType::BFloat16);
  adam_step(segments_of(got), {}, nullptr, nullptr, ScalarType::BFloat16, Stream{});
  for (int64_t i = 0; i < kCount; ++i) {
    EXPECT_TRUE(got[i].same_bytes(expected[i])) << "segment " << i;
  }
}

TEST(AdamStep, WithoutAWorkingArrayOrWithTheMasterItselfOnlyTheMasterIsWritten) {
  Arrays expected(20000, ScalarType::Float, 0);
  Arrays without = expected;
  Arrays itself = expected;
  AdamSegment segment = expected.adam();
  segment.working = nullptr;
  reference::adam_step(segment, {}, nullptr, nullptr, ScalarType::Float);
  segment = without.adam();
  segment.working = nullptr;
  adam_step(segment, {}, nullptr, nullptr, ScalarType::Half, Stream{});
  segment = itself.adam();
  segment.working = segment.master;
  adam_step(segment, {}, nullptr, nullptr, ScalarType::Half, Stream{});
  EXPECT_TRUE(without.same_bytes(expected));
  EXPECT_TRUE(itself.same_bytes(expected));
}

TEST(Steps, ANonFiniteCountLeavesEveryBitAsItWas) {
  const Arrays before(1000, ScalarType::Half, 1);
  const float coefficient = NAN;
  for (double nonfinite : {1.0, 17.0, static_cast<double>(NAN)}) {
    Arrays arrays = before;
    adam_step(arrays.adam(), {.amsgrad = true}, &coefficient, &nonfinite, ScalarType::Half,
              Stream{});
    EXPECT_TRUE(arrays.same_bytes(before));
    sgd_step(arrays.sgd(), {.momentum = 0.9}, &coefficient, &nonfinite, ScalarType::Half, Stream{});
    EXPECT_TRUE(arrays.same_bytes(before));
    lion_step(arrays.lion(), {}, &coefficient, &nonfinite, ScalarType::Half, Stream{});
    EXPECT_TRUE(arrays.same_bytes(before));
  }
  const double none = 0.0;
  Arrays arrays = before;
  adam_step(arrays.adam(), {}, nullptr, &none, ScalarType::Half, Stream{});
  EXPECT_FALSE(arrays.same_bytes(before));
}

TEST(SgdStep, EveryVariantSizeAndSettingHasTheBitsOfTheReference) {
  const float coefficient = 0.37F;
  for (ScalarType dtype : kWorkingTypes) {
    for (int64_t numel : kSizes) {
      for (int variant = 0; variant < 16; ++variant) {
        if (numel > 1100 && variant != 7) {
          continue;  // the threads' shares are the same for every variant
        }
        SgdOptions options{.lr = 0.1};
        options.momentum = (variant & 1) != 0 ? 0.9 : 0.0;
        options.weight_decay = (variant & 2) != 0 ? 0.01 : 0.0;
        options.nesterov = (variant & 4) != 0;
        options.dampening = (variant & 4) != 0 ? 0.0 : 0.3;
        const bool first_step = (variant & 8) != 0;
        const Arrays start(numel, dtype, variant % 2);
        Arrays expected = start;
        SgdSegment segment = expected.sgd();
        segment.first_step = first_step;
        reference::sgd_step(segment, options, &coefficient, nullptr, dtype);
        for_each_setting([&] {
          Arrays got = start;
          SgdSegment mine = got.sgd();
          mine.first_step = first_step;
          sgd_step(mine, options, &coefficient, nullptr, dtype, Stream{});
          ASSERT_TRUE(got.same_bytes(expected))
              << c10::toString(dtype) << " numel " << numel << " variant " << variant;
          ASSERT_TRUE(got.guards_intact());
        });
      }
    }
  }
}

TEST(SgdStep, TheFirstStepDoesNotReadTheMomentum) {
  Arrays arrays(100, ScalarType::Float, 0);
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
    Arrays expected(100, ScalarType::BFloat16, 1);
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

TEST(LionStep, EveryVariantSizeAndSettingHasTheBitsOfTheReference) {
  const float coefficient = 0.37F;
  for (ScalarType dtype : kWorkingTypes) {
    for (int64_t numel : kSizes) {
      for (int variant = 0; variant < 4; ++variant) {
        if (numel > 1100 && variant != 3) {
          continue;  // the threads' shares are the same for every variant
        }
        LionOptions options{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95};
        options.weight_decay = (variant & 1) != 0 ? 0.1 : 0.0;
        const float* scale = (variant & 2) != 0 ? &coefficient : nullptr;
        Arrays start(numel, dtype, variant % 2);
        for (int64_t i = 0; i < numel; i += 5) {  // no direction
          start.first.as<float>()[i] = 0.0F;
          start.gradient.as<float>()[i] = i % 2 == 0 ? 0.0F : -0.0F;
        }
        Arrays expected = start;
        reference::lion_step(expected.lion(), options, scale, nullptr, dtype);
        for_each_setting([&] {
          Arrays got = start;
          lion_step(got.lion(), options, scale, nullptr, dtype, Stream{});
          ASSERT_TRUE(got.same_bytes(expected))
              << c10::toString(dtype) << " numel " << numel << " variant " << variant;
          ASSERT_TRUE(got.guards_intact());
        });
      }
    }
  }
}

// Of each update, one with the learning rate by value and one that reads it from memory.
template <class Segment, class Options, class Step>
void expect_rate_from_memory(Segment (Arrays::*segment_of)(), Options options, const Step& step) {
  options.lr = 0.0123;
  options.weight_decay = 0.3;
  const float count = 7.0F;
  Arrays expected(1000, ScalarType::BFloat16, 0);
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
  Arrays arrays(10, ScalarType::Float, 0);
  const double rate = 0.1;
  EXPECT_THROW(
      adam_step(arrays.adam(), {.device_lr = &rate}, nullptr, nullptr, ScalarType::Float, Stream{}),
      c10::Error);
}

TEST(EmaStep, EverySizeAndSettingHasTheBitsOfTheReference) {
  const float weight = 0.0137F;
  for (int64_t numel : kSizes) {
    const Arrays start(numel, ScalarType::Float, 0);
    Arrays expected = start;
    reference::ema_step(expected.ema(), weight);
    for_each_setting([&] {
      Arrays got = start;
      ema_step(got.ema(), weight, nullptr, Stream{});
      ASSERT_TRUE(got.same_bytes(expected)) << numel;
      ASSERT_TRUE(got.guards_intact());
      got = start;
      ema_step(got.ema(), /*weight=*/1.0F, &weight, Stream{});
      ASSERT_TRUE(got.same_bytes(expected)) << numel << ", a weight by its address";
    });
  }
}

TEST(EmaStep, ManySegments) {
  constexpr int64_t kCount = 60;
  const float weight = 0.25F;
  std::vector<Arrays> got, expected;
  std::vector<EmaSegment> segments;
  for (int64_t i = 0; i < kCount; ++i) got.emplace_back(i * 7 % 50, ScalarType::Float, 0);
  expected = got;
  for (int64_t i = 0; i < kCount; ++i) {
    segments.push_back(got[i].ema());
    reference::ema_step(expected[i].ema(), weight);
  }
  ema_step(segments, weight, nullptr, Stream{});
  for (int64_t i = 0; i < kCount; ++i) EXPECT_TRUE(got[i].same_bytes(expected[i])) << i;
}

TEST(EmaStep, AWeightOfZeroWritesNothing) {
  Arrays got(100, ScalarType::Float, 0);
  got.master.as<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  const Arrays before = got;
  const float none = 0.0F;
  ema_step(got.ema(), none, nullptr, Stream{});
  ema_step(got.ema(), 0.5F, &none, Stream{});
  EXPECT_TRUE(got.same_bytes(before));
}

TEST(EmaStep, RefusesSegmentsThatHaveNoMemory) {
  Arrays arrays(10, ScalarType::Float, 0);
  EmaSegment segment = arrays.ema();
  segment.values = nullptr;
  EXPECT_THROW(ema_step(segment, 0.5F, nullptr, Stream{}), c10::Error);
  segment = arrays.ema();
  segment.numel = -1;
  EXPECT_THROW(ema_step(segment, 0.5F, nullptr, Stream{}), c10::Error);
  ema_step(EmaSegment{}, 0.5F, nullptr, Stream{});
}

TEST(LionStep, ManySegmentsAndTheMasterItselfAsWorkingArray) {
  std::vector<Arrays> expected;
  for (int64_t i = 0; i < 70; ++i) {
    expected.emplace_back(i == 3 ? 40000 : i * 3 % 50, ScalarType::Float, i % 4);
  }
  std::vector<Arrays> got = expected;
  const auto segments_of = [&](std::vector<Arrays>& arrays) {
    std::vector<LionSegment> segments;
    for (size_t i = 0; i < arrays.size(); ++i) {
      segments.push_back(arrays[i].lion());
      if (i % 3 == 0) segments.back().working = segments.back().master;
      if (i % 3 == 1) segments.back().working = nullptr;
    }
    return segments;
  };
  reference::lion_step(segments_of(expected), {}, nullptr, nullptr, ScalarType::Float);
  lion_step(segments_of(got), {}, nullptr, nullptr, ScalarType::Float, Stream{});
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].same_bytes(expected[i])) << "segment " << i;
  }
}

TEST(Steps, RefuseWhatTheyCannotDo) {
  Arrays arrays(10, ScalarType::Float, 0);
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
