// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// adam_step, sgd_step and lion_step with stored state against their scalar definitions: equal bits
// in every setting, for every type, size and alignment, and however a parameter is cut.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/adam.h"
#include "kernels/lion.h"
#include "kernels/sgd.h"
#include "kernels/stored_state.h"
#include "tests/kernels/stored_reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

constexpr StateType kStored[] = {StateType::kBFloat16, StateType::kInt8};
const std::vector<int64_t> kStoredSizes = {0, 1, 255, 256, 257, 1000, 70000};

// The arrays of one segment; copies are independent. State arrays begin `offset` elements, or with
// kInt8 scales, off their alignment to a vector.
struct Arrays {
  Arrays(StateType type, int64_t numel, ScalarType working_dtype, int64_t offset)
      : type(type),
        numel(numel),
        master(4 * numel, 4 * offset),
        first(state_bytes(type, numel), (type == StateType::kInt8 ? 4 : 2) * offset),
        second(state_bytes(type, numel), (type == StateType::kInt8 ? 4 : 2) * offset),
        largest(4 * numel, 4 * offset),
        gradient(4 * numel, 4 * offset),
        working(numel * size_of(working_dtype), offset * size_of(working_dtype)) {
    fill_ordinary(master.as<float>(), numel, 1);
    fill_ordinary(gradient.as<float>(), numel, 4, 1e-2F);
    std::vector<float> values(static_cast<size_t>(numel));
    fill_ordinary(values.data(), numel, 2, 1e-2F);
    encode_state(type, false, values.data(), numel, first.as<void>());
    for (int64_t i = 0; i < numel; ++i) {
      values[i] *= values[i];
      largest.as<float>()[i] = values[i] * static_cast<float>(i % 3);
      if (i % 7 == 0) values[i] = 0.0F;
    }
    encode_state(type, true, values.data(), numel, second.as<void>());
  }

  AdamSegment adam() {
    AdamSegment s;
    s.master = master.as<float>();
    s.exp_avg = first.as<void>();
    s.exp_avg_sq = second.as<void>();
    s.max_exp_avg_sq = largest.as<float>();
    s.gradient = gradient.as<float>();
    s.working = working.as<void>();
    s.numel = numel;
    s.step = 7;
    s.state_type = type;
    s.parameter = parameter;
    s.element = element;
    return s;
  }
  SgdSegment sgd() {
    const AdamSegment s = adam();
    return {s.master, s.exp_avg, s.gradient,   s.working,   s.numel,
            false,    nullptr,   s.state_type, s.parameter, s.element};
  }
  LionSegment lion() {
    const AdamSegment s = adam();
    return {s.master, s.exp_avg,    s.gradient,  s.working,
            s.numel,  s.state_type, s.parameter, s.element};
  }

  bool same_bytes(const Arrays& other) const {
    return master.same_bytes(other.master) && first.same_bytes(other.first) &&
           second.same_bytes(other.second) && largest.same_bytes(other.largest) &&
           gradient.same_bytes(other.gradient) && working.same_bytes(other.working);
  }
  bool guards_intact() const {
    return master.guards_intact() && first.guards_intact() && second.guards_intact() &&
           largest.guards_intact() && gradient.guards_intact() && working.guards_intact();
  }

  StateType type;
  int64_t numel;
  int64_t parameter = 3;
  int64_t element = 512;
  Buffer master, first, second, largest, gradient, working;
};

// What one step does with the kernels, and what it has to do. `variant` chooses options.
struct Adam {
  static constexpr int kVariants = 8;
  static AdamOptions options(int variant, int64_t step) {
    AdamOptions o{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6};
    o.amsgrad = (variant & 1) != 0;
    o.decoupled = (variant & 2) != 0;
    o.weight_decay = (variant & 4) != 0 ? 0.1 : 0.0;
    o.noise_step = step;
    return o;
  }
  static AdamSegment segment(Arrays& arrays, int) { return arrays.adam(); }
  static void step(c10::ArrayRef<AdamSegment> s, const AdamOptions& o, const float* coefficient,
                   const double* nonfinite, ScalarType dtype) {
    adam_step(s, o, coefficient, nonfinite, dtype, Stream{});
  }
  static void expect(const AdamSegment& s, const AdamOptions& o, const float* coefficient,
                     ScalarType dtype) {
    reference::stored_adam_step(s, o, coefficient, dtype);
  }
};

struct Sgd {
  static constexpr int kVariants = 8;
  static SgdOptions options(int variant, int64_t step) {
    SgdOptions o{.lr = 0.1, .momentum = 0.9};
    o.dampening = (variant & 1) != 0 ? 0.0 : 0.3;
    o.nesterov = (variant & 1) != 0;
    o.weight_decay = (variant & 2) != 0 ? 0.01 : 0.0;
    o.noise_step = step;
    return o;
  }
  static SgdSegment segment(Arrays& arrays, int variant) {
    SgdSegment s = arrays.sgd();
    s.first_step = (variant & 4) != 0;
    return s;
  }
  static void step(c10::ArrayRef<SgdSegment> s, const SgdOptions& o, const float* coefficient,
                   const double* nonfinite, ScalarType dtype) {
    sgd_step(s, o, coefficient, nonfinite, dtype, Stream{});
  }
  static void expect(const SgdSegment& s, const SgdOptions& o, const float* coefficient,
                     ScalarType dtype) {
    reference::stored_sgd_step(s, o, coefficient, dtype);
  }
};

struct Lion {
  static constexpr int kVariants = 2;
  static LionOptions options(int variant, int64_t step) {
    LionOptions o{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95};
    o.weight_decay = variant != 0 ? 0.1 : 0.0;
    o.noise_step = step;
    return o;
  }
  static LionSegment segment(Arrays& arrays, int) { return arrays.lion(); }
  static void step(c10::ArrayRef<LionSegment> s, const LionOptions& o, const float* coefficient,
                   const double* nonfinite, ScalarType dtype) {
    lion_step(s, o, coefficient, nonfinite, dtype, Stream{});
  }
  static void expect(const LionSegment& s, const LionOptions& o, const float* coefficient,
                     ScalarType dtype) {
    reference::stored_lion_step(s, o, coefficient, dtype);
  }
};

template <class Rule>
class StoredUpdate : public ::testing::Test {};
using Rules = ::testing::Types<Adam, Sgd, Lion>;
TYPED_TEST_SUITE(StoredUpdate, Rules);

TYPED_TEST(StoredUpdate, EveryVariantSizeAndSettingHasTheBitsOfTheReference) {
  using Rule = TypeParam;
  const float coefficient = 0.37F;
  const ScalarType dtypes[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  for (const StateType type : kStored) {
    for (const int64_t numel : kStoredSizes) {
      for (int variant = 0; variant < Rule::kVariants; ++variant) {
        if (numel > 1100 && variant + 1 != Rule::kVariants) continue;
        const ScalarType dtype = dtypes[variant % 3];
        const Arrays start(type, numel, dtype, variant % 3);
        Arrays expected = start;
        for (int64_t step = 0; step < 2; ++step) {
          Rule::expect(Rule::segment(expected, variant), Rule::options(variant, step), &coefficient,
                       dtype);
        }
        for_each_setting([&] {
          Arrays got = start;
          for (int64_t step = 0; step < 2; ++step) {
            Rule::step(Rule::segment(got, variant), Rule::options(variant, step), &coefficient,
                       nullptr, dtype);
          }
          ASSERT_TRUE(got.first.same_bytes(expected.first)) << "variant " << variant;
          ASSERT_TRUE(got.second.same_bytes(expected.second)) << "variant " << variant;
          ASSERT_TRUE(got.same_bytes(expected))
              << "type " << static_cast<int>(type) << " numel " << numel << " variant " << variant;
          ASSERT_TRUE(got.guards_intact());
        });
      }
    }
  }
}

// Segments of all types in one call, with their own parameters, lengths and places.
TYPED_TEST(StoredUpdate, SegmentsOfSeveralTypesAndParameters) {
  using Rule = TypeParam;
  std::vector<Arrays> expected;
  for (int64_t i = 0; i < 60; ++i) {
    const auto type = static_cast<StateType>(1 + i % 2);
    expected.emplace_back(type, i == 4 ? 40000 : i * 37 % 700, ScalarType::BFloat16, i % 4);
    expected.back().parameter = i / 3;
    expected.back().element = i % 5 * 256;
  }
  std::vector<Arrays> got = expected;
  std::vector<decltype(Rule::segment(got[0], 0))> segments;
  for (size_t i = 0; i < got.size(); ++i) {
    segments.push_back(Rule::segment(got[i], 0));
    auto segment = Rule::segment(expected[i], 0);
    if (i % 4 == 1) {
      segments.back().working = segments.back().master;
      segment.working = segment.master;
    }
    Rule::expect(segment, Rule::options(0, 5), nullptr, ScalarType::BFloat16);
  }
  auto options = Rule::options(0, 17);  // not looked at
  const double step = 5.0;
  options.device_noise_step = &step;
  Rule::step(segments, options, nullptr, nullptr, ScalarType::BFloat16);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].same_bytes(expected[i])) << "segment " << i;
  }
}

// A parameter in three pieces, which begin at blocks, has the bits of the whole one.
TYPED_TEST(StoredUpdate, CutsAtBlocksChangeNoBit) {
  using Rule = TypeParam;
  constexpr int64_t kNumel = 4096;
  const int64_t cuts[] = {0, 256, 1792, kNumel};
  for (const StateType type : kStored) {
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
                 ScalarType::Half);
      Rule::step(segments, Rule::options(0, step), nullptr, nullptr, ScalarType::Half);
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
  }
}

TYPED_TEST(StoredUpdate, ANonFiniteCountLeavesEveryBitAsItWas) {
  using Rule = TypeParam;
  const double nonfinite = 1.0;
  for (const StateType type : kStored) {
    const Arrays before(type, 1000, ScalarType::Half, 1);
    Arrays arrays = before;
    Rule::step(Rule::segment(arrays, 0), Rule::options(0, 1), nullptr, &nonfinite,
               ScalarType::Half);
    EXPECT_TRUE(arrays.same_bytes(before));
  }
}

TYPED_TEST(StoredUpdate, RefusesElementsAtWhichNoBlockBegins) {
  using Rule = TypeParam;
  Arrays arrays(StateType::kInt8, 1000, ScalarType::Float, 0);
  auto segment = Rule::segment(arrays, 0);
  for (const int64_t element : {1, 255, -256, 257}) {
    segment.element = element;
    EXPECT_THROW(Rule::step(segment, Rule::options(0, 1), nullptr, nullptr, ScalarType::Float),
                 c10::Error);
  }
  segment.element = 0;
  segment.state_type = static_cast<StateType>(7);
  EXPECT_THROW(Rule::step(segment, Rule::options(0, 1), nullptr, nullptr, ScalarType::Float),
               c10::Error);
}

TEST(StoredSgd, WithoutMomentumStateIsNotTouched) {
  Arrays expected(StateType::kInt8, 1000, ScalarType::Float, 0);
  Arrays got = expected;
  reference::stored_sgd_step(expected.sgd(), {.lr = 0.1}, nullptr, ScalarType::Float);
  SgdSegment segment = got.sgd();
  segment.momentum = nullptr;
  sgd_step(segment, {.lr = 0.1}, nullptr, nullptr, ScalarType::Float, Stream{});
  EXPECT_TRUE(got.same_bytes(expected));
}

}  // namespace
}  // namespace zero::kernels
