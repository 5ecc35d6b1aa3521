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
#include <iterator>
#include <limits>
#include <vector>

#include "kernels/adam.h"
#include "kernels/lion.h"
#include "kernels/sgd.h"
#include "kernels/split_master.h"
#include "kernels/stored_state.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

constexpr StateType kTypes[] = {StateType::kFloat, StateType::kBFloat16, StateType::kInt8};
const std::vector<int64_t> kNumels = {0, 1, 255, 256, 257, 1000, 70000};
constexpr auto kDtype = ScalarType::BFloat16;

// Masters that rounding is hard for: ties, the ends of the range, subnormal numbers, zeros.
constexpr uint32_t kHard[] = {0x3f808000U, 0x3f818000U, 0xbf808000U, 0x3f807fffU, 0xbf808001U,
                              0x00000001U, 0x80000001U, 0x007fffffU, 0x80000000U, 0x00008000U,
                              0x7f7fffffU, 0xff7fffffU, 0x7f7f8000U, 0xff7f7fffU};

// The arrays of one segment, whose master is fp32 beside a working value, or split.
struct Arrays {
  Arrays(StateType type, int64_t numel, int64_t offset)
      : type(type),
        numel(numel),
        master(4 * numel, 4 * offset),
        remainder(2 * numel, 2 * offset),
        working(2 * numel, 2 * offset),
        first(state_bytes(type, numel), (type == StateType::kBFloat16 ? 2 : 4) * offset),
        second(state_bytes(type, numel), (type == StateType::kBFloat16 ? 2 : 4) * offset),
        largest(4 * numel, 4 * offset),
        gradient(4 * numel, 4 * offset) {
    fill_ordinary(master.as<float>(), numel, 1);
    for (int64_t i = 3; i < numel; i += 5) {
      master.as<float>()[i] = std::bit_cast<float>(kHard[i / 5 % std::size(kHard)]);
    }
    fill_ordinary(gradient.as<float>(), numel, 4, 1e-2F);
    std::vector<float> values(static_cast<size_t>(numel));
    fill_ordinary(values.data(), numel, 2, 1e-2F);
    encode_state(type, false, values.data(), numel, first.as<void>());
    for (int64_t i = 0; i < numel; ++i) {
      values[i] *= values[i];
      largest.as<float>()[i] = values[i] * static_cast<float>(i % 3);
      // Where nothing moves, not even a hard master.
      if (i % 5 == 3 && i % 2 == 1) gradient.as<float>()[i] = 0.0F;
    }
    encode_state(type, true, values.data(), numel, second.as<void>());
    split_halves(master.as<float>(), numel, working.as<void>(), remainder.as<int16_t>(), Stream{});
  }

  AdamSegment adam() {
    AdamSegment s;
    s.exp_avg = first.as<void>();
    s.exp_avg_sq = second.as<void>();
    s.max_exp_avg_sq = largest.as<float>();
    s.gradient = gradient.as<float>();
    s.working = working.as<void>();
    s.numel = numel;
    s.step = 7;
    s.state_type = type;
    s.parameter = 3;
    s.element = 512;
    s.remainder = remainder.as<int16_t>();
    return s;
  }
  SgdSegment sgd() {
    const AdamSegment s = adam();
    return {nullptr, s.exp_avg,    s.gradient,  s.working, s.numel,    false,
            nullptr, s.state_type, s.parameter, s.element, s.remainder};
  }
  LionSegment lion() {
    const AdamSegment s = adam();
    return {nullptr,      s.exp_avg,   s.gradient, s.working,  s.numel,
            s.state_type, s.parameter, s.element,  s.remainder};
  }

  bool same_bytes(const Arrays& other) const {
    return master.same_bytes(other.master) && remainder.same_bytes(other.remainder) &&
           working.same_bytes(other.working) && same_others(other);
  }
  // All but the master and the working value.
  bool same_others(const Arrays& other) const {
    return first.same_bytes(other.first) && second.same_bytes(other.second) &&
           largest.same_bytes(other.largest) && gradient.same_bytes(other.gradient);
  }
  bool guards_intact() const {
    return master.guards_intact() && remainder.guards_intact() && working.guards_intact() &&
           first.guards_intact() && second.guards_intact() && largest.guards_intact() &&
           gradient.guards_intact();
  }
  std::vector<float> joined() {
    std::vector<float> values(static_cast<size_t>(numel));
    join_halves(working.as<void>(), remainder.as<int16_t>(), numel, values.data(), Stream{});
    return values;
  }
  // Whether the halves here have the bits of the fp32 master there. A NaN has no particular bits.
  bool has_master_of(Arrays& plain) {
    const std::vector<float> values = joined();
    for (int64_t i = 0; i < numel; ++i) {
      const float expected = plain.master.as<float>()[i];
      if (std::isnan(values[i]) && std::isnan(expected)) continue;
      if (std::bit_cast<uint32_t>(values[i]) != std::bit_cast<uint32_t>(expected)) return false;
    }
    return true;
  }

  StateType type;
  int64_t numel;
  Buffer master, remainder, working, first, second, largest, gradient;
};

// `variant` chooses options.
struct Adam {
  static constexpr int kVariants = 8;
  static AdamSegment segment(Arrays& arrays, int) { return arrays.adam(); }
  static void step(c10::ArrayRef<AdamSegment> s, int variant, int64_t step, const double* nonfinite,
                   ScalarType dtype) {
    AdamOptions o{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6};
    o.amsgrad = (variant & 1) != 0;
    o.decoupled = (variant & 2) != 0;
    o.weight_decay = (variant & 4) != 0 ? 0.1 : 0.0;
    o.noise_step = step;
    const float coefficient = 0.37F;
    adam_step(s, o, &coefficient, nonfinite, dtype, Stream{});
  }
};

struct Sgd {
  static constexpr int kVariants = 16;
  static SgdSegment segment(Arrays& arrays, int variant) {
    SgdSegment s = arrays.sgd();
    s.first_step = (variant & 4) != 0;
    return s;
  }
  static void step(c10::ArrayRef<SgdSegment> s, int variant, int64_t step, const double* nonfinite,
                   ScalarType dtype) {
    SgdOptions o{.lr = 0.1, .momentum = (variant & 8) != 0 ? 0.0 : 0.9};
    o.dampening = (variant & 1) != 0 ? 0.0 : 0.3;
    o.nesterov = (variant & 1) != 0 && o.momentum != 0.0;
    o.weight_decay = (variant & 2) != 0 ? 0.01 : 0.0;
    o.noise_step = step;
    sgd_step(s, o, nullptr, nonfinite, dtype, Stream{});
  }
};

struct Lion {
  static constexpr int kVariants = 2;
  static LionSegment segment(Arrays& arrays, int) { return arrays.lion(); }
  static void step(c10::ArrayRef<LionSegment> s, int variant, int64_t step, const double* nonfinite,
                   ScalarType dtype) {
    LionOptions o{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95};
    o.weight_decay = variant != 0 ? 0.1 : 0.0;
    o.noise_step = step;
    const float coefficient = 0.37F;
    lion_step(s, o, &coefficient, nonfinite, dtype, Stream{});
  }
};

// The same arrays with an fp32 master.
template <class Rule>
auto plain_segment(Arrays& arrays, int variant) {
  auto segment = Rule::segment(arrays, variant);
  segment.master = arrays.master.template as<float>();
  segment.remainder = nullptr;
  return segment;
}

template <class Rule>
class SplitUpdate : public ::testing::Test {};
using Rules = ::testing::Types<Adam, Sgd, Lion>;
TYPED_TEST_SUITE(SplitUpdate, Rules);

TYPED_TEST(SplitUpdate, HasTheBitsOfFp32Masters) {
  using Rule = TypeParam;
  for (const StateType type : kTypes) {
    for (const int64_t numel : kNumels) {
      for (int variant = 0; variant < Rule::kVariants; ++variant) {
        if (numel > 1100 && variant + 1 != Rule::kVariants && variant != 2) continue;
        const Arrays start(type, numel, variant % 3);
        Arrays plain = start;
        for (int64_t step = 0; step < 3; ++step) {
          Rule::step(plain_segment<Rule>(plain, variant), variant, step, nullptr, kDtype);
        }
        for_each_setting([&] {
          Arrays split = start;
          for (int64_t step = 0; step < 3; ++step) {
            Rule::step(Rule::segment(split, variant), variant, step, nullptr, kDtype);
          }
          ASSERT_TRUE(split.has_master_of(plain))
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
  std::vector<Arrays> split, plain;
  std::vector<decltype(Rule::segment(split[0], 0))> segments;
  for (int64_t i = 0; i < 60; ++i) {
    split.emplace_back(kTypes[i % 3], i == 4 ? 40000 : i * 37 % 700, i % 8);
  }
  plain = split;
  for (size_t i = 0; i < split.size(); ++i) {
    segments.push_back(i % 4 == 1 ? plain_segment<Rule>(split[i], 0) : Rule::segment(split[i], 0));
    Rule::step(plain_segment<Rule>(plain[i], 0), 0, 5, nullptr, kDtype);
  }
  Rule::step(segments, 0, 5, nullptr, kDtype);
  for (size_t i = 0; i < split.size(); ++i) {
    EXPECT_TRUE(split[i].same_others(plain[i])) << "segment " << i;
    if (i % 4 == 1) {
      EXPECT_TRUE(split[i].same_bytes(plain[i])) << "segment " << i;
    } else {
      EXPECT_TRUE(split[i].has_master_of(plain[i])) << "segment " << i;
    }
  }
}

TYPED_TEST(SplitUpdate, MastersThatAreNotFiniteStaySo) {
  using Rule = TypeParam;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const StateType type : kTypes) {
    for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      Arrays plain(type, 600, 0);
      plain.master.as<float>()[300] = bad;
      split_halves(plain.master.as<float>(), 600, plain.working.as<void>(),
                   plain.remainder.as<int16_t>(), Stream{});
      Arrays split = plain;
      for (int64_t step = 0; step < 2; ++step) {
        Rule::step(plain_segment<Rule>(plain, 2), 2, step, nullptr, kDtype);
        Rule::step(Rule::segment(split, 2), 2, step, nullptr, kDtype);
      }
      EXPECT_TRUE(split.has_master_of(plain)) << bad;
      EXPECT_FALSE(std::isfinite(split.joined()[300]));
      EXPECT_TRUE(std::isfinite(split.joined()[104]));  // of another block
    }
  }
}

TYPED_TEST(SplitUpdate, ANonFiniteCountLeavesEveryBitAsItWas) {
  using Rule = TypeParam;
  for (const double nonfinite : {1.0, std::numeric_limits<double>::quiet_NaN()}) {
    for (const StateType type : kTypes) {
      const Arrays before(type, 1000, 1);
      Arrays arrays = before;
      Rule::step(Rule::segment(arrays, 0), 0, 1, &nonfinite, kDtype);
      EXPECT_TRUE(arrays.same_bytes(before));
    }
  }
}

TYPED_TEST(SplitUpdate, RefusesWhatItCannotDo) {
  using Rule = TypeParam;
  const Arrays before(StateType::kFloat, 1000, 0);
  Arrays arrays = before;
  const auto good = Rule::segment(arrays, 0);
  for (const ScalarType dtype : {ScalarType::Float, ScalarType::Half}) {
    EXPECT_THROW(Rule::step(good, 0, 1, nullptr, dtype), c10::Error);
  }
  auto bad = good;
  bad.working = nullptr;
  EXPECT_THROW(Rule::step(bad, 0, 1, nullptr, kDtype), c10::Error);
  bad = good;
  bad.master = arrays.master.template as<float>();
  EXPECT_THROW(Rule::step(bad, 0, 1, nullptr, kDtype), c10::Error);
  bad = good;
  bad.gradient = nullptr;
  EXPECT_THROW(Rule::step(bad, 0, 1, nullptr, kDtype), c10::Error);
  bad = good;
  bad.remainder = nullptr;
  EXPECT_THROW(Rule::step(bad, 0, 1, nullptr, kDtype), c10::Error);
  EXPECT_TRUE(arrays.same_bytes(before));
}

}  // namespace
}  // namespace zero::kernels
