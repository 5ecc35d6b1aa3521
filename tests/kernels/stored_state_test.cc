// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Stored state as stored_state.h promises it: bounds of errors, exact reversal, zeros, values that
// are not finite; and the noise: no bias, and no average that stands still.
#include "kernels/stored_state.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/adam.h"
#include "kernels/lion.h"
#include "tests/kernels/stored_reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;
using Floats = std::vector<float>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

// A state array; fp32 for its alignment.
Floats stored_memory(StateType type, int64_t numel) {
  return Floats(static_cast<size_t>(state_bytes(type, numel) / 4 + 1));
}

Floats encoded(StateType type, bool root, const Floats& values) {
  const auto numel = static_cast<int64_t>(values.size());
  Floats stored = stored_memory(type, numel);
  encode_state(type, root, values.data(), numel, stored.data());
  return stored;
}

Floats decoded(StateType type, bool root, const Floats& stored, int64_t numel) {
  Floats values(static_cast<size_t>(numel));
  decode_state(type, root, stored.data(), numel, values.data());
  return values;
}

Floats round_trip(StateType type, bool root, const Floats& values) {
  return decoded(type, root, encoded(type, root, values), static_cast<int64_t>(values.size()));
}

uint8_t* codes_of(Floats& stored, int64_t numel) {
  return reinterpret_cast<uint8_t*>(stored.data() + (numel + 255) / 256);
}

TEST(StoredState, Bytes) {
  EXPECT_EQ(state_bytes(StateType::kFloat, 257), 1028);
  EXPECT_EQ(state_bytes(StateType::kBFloat16, 257), 514);
  EXPECT_EQ(state_bytes(StateType::kInt8, 0), 0);
  EXPECT_EQ(state_bytes(StateType::kInt8, 1), 4 + 1);
  EXPECT_EQ(state_bytes(StateType::kInt8, 256), 4 + 256);
  EXPECT_EQ(state_bytes(StateType::kInt8, 257), 8 + 257);
}

TEST(StoredState, NearestRoundingMatchesTheReferenceInEverySizeAndSetting) {
  for (const bool root : {false, true}) {
    for (int64_t numel : kSizes) {
      for (const bool any_bits : {false, true}) {
        Floats values(static_cast<size_t>(numel));
        any_bits ? fill_any_bits(values.data(), numel, 3) : fill_ordinary(values.data(), numel, 4);
        const std::vector<uint32_t> nearest(values.size(), 0x80008000U);
        Buffer expected(state_bytes(StateType::kInt8, numel), 4);
        reference::store_values(StateType::kInt8, root, values.data(), numel, nearest.data(),
                                expected.as<void>());
        for_each_setting([&] {
          Buffer got(state_bytes(StateType::kInt8, numel), 4);
          encode_state(StateType::kInt8, root, values.data(), numel, got.as<void>());
          ASSERT_TRUE(got.same_bytes(expected)) << "root " << root << ", numel " << numel;
          ASSERT_TRUE(got.guards_intact());
          Floats back(static_cast<size_t>(numel));
          decode_state(StateType::kInt8, root, got.as<void>(), numel, back.data());
          for (int64_t i = 0; i < numel; ++i) {
            const float value =
                reference::stored_value(StateType::kInt8, root, got.as<void>(), numel, i);
            ASSERT_EQ(ulp_distance(back[i], value), 0) << i;
          }
        });
      }
    }
  }
}

TEST(StoredState, ErrorsOfNearestRoundingAreWithinTheBounds) {
  for (const bool root : {false, true}) {
    const double squares = root ? 65025.0 : 16129.0;
    for (int exponent = -80; exponent <= (root ? 120 : 124); exponent += 7) {
      Floats x(2000);
      fill_ordinary(x.data(), 2000, static_cast<uint32_t>(exponent + 200));
      for (size_t i = 0; i < x.size(); ++i) {
        x[i] = std::ldexp(x[i] / 8, exponent - static_cast<int>(i % 16));
        if (root) x[i] = std::fabs(x[i]);
      }
      const Floats got = round_trip(StateType::kInt8, root, x);
      for (size_t begin = 0; begin < x.size(); begin += 256) {
        const size_t end = std::min(x.size(), begin + 256);
        const auto size_of_value = [&](float value) {
          const double size = std::fabs(static_cast<double>(value));
          return root ? std::sqrt(size) : size;
        };
        double largest = 0;
        for (size_t i = begin; i < end; ++i) largest = std::max(largest, size_of_value(x[i]));
        for (size_t i = begin; i < end; ++i) {
          // Half of the distance to the next code, and in a root the whole first one.
          const double size = size_of_value(x[i]), q = std::sqrt(size / largest * squares);
          const double bound = (q + 1.0) * largest / squares + largest * 0x1p-22;
          ASSERT_LE(std::fabs(size_of_value(got[i]) - size), bound) << i << ", 2^" << exponent;
          ASSERT_TRUE(root || x[i] * got[i] >= 0.0F) << "the sign of " << x[i];
        }
      }
    }
  }
}

TEST(StoredState, NearestRoundingOfBFloat16IsToEven) {
  EXPECT_EQ(round_trip(StateType::kBFloat16, true, {1.0F + 0x1p-8F, 1.0F + 0x1.8p-7F, -0.0F}),
            (Floats{1.0F, 1.0F + 0x1p-6F, -0.0F}));
}

// All codes, with a block of each scale.
TEST(StoredState, EncodingWhatWasDecodedRestoresEveryBit) {
  for (const bool root : {false, true}) {
    Floats scales = {0.0F, kNaN, 1.0F, 0x1.fffffep-1F, 0x1.000002p0F, 3.0F, 0.1F, 1e-3F, 7e-11F};
    for (int exponent = -46; exponent < 63; exponent += 3) {
      scales.push_back(std::ldexp(1.7F + 0.01F * static_cast<float>(exponent % 20), exponent));
    }
    if (root) {
      scales.insert(scales.end(), {0x1p-46F, 0x1.fffffep63F});
    } else {
      scales.insert(scales.end(), {0x1p-100F, 0x1.000002p-100F, 0x1p-99F, kLargest, kLargest / 3});
    }
    const auto numel = static_cast<int64_t>(scales.size()) * 256;
    Floats stored = stored_memory(StateType::kInt8, numel);
    std::copy(scales.begin(), scales.end(), stored.begin());
    for (int64_t i = 0; i < numel; ++i) {
      const float scale = scales[static_cast<size_t>(i / 256)];
      const int q = root ? static_cast<int>(i % 256) : static_cast<int>(i % 255) - 127;
      codes_of(stored, numel)[i] = static_cast<uint8_t>(scale > 0.0F ? q : 0);
      // The code of the largest magnitude has to be there.
      if (!root && i % 256 == 255 && scale > 0.0F) {
        codes_of(stored, numel)[i] = static_cast<uint8_t>(-127);
      }
    }
    for_each_setting([&] {
      const Floats back =
          encoded(StateType::kInt8, root, decoded(StateType::kInt8, root, stored, numel));
      ASSERT_EQ(std::memcmp(back.data(), stored.data(),
                            static_cast<size_t>(state_bytes(StateType::kInt8, numel))),
                0)
          << "root " << root;
    });
  }
}

TEST(StoredState, SmallestScalesAndZerosAreZero) {
  for (const float scale : {0.0F, 0x1p-149F, 0x1p-126F, 0x1.fffffep-101F}) {
    Floats x(256, scale);
    x[7] = -scale / 2;
    EXPECT_EQ(round_trip(StateType::kInt8, false, x), Floats(256, 0.0F)) << scale;
  }
  Floats x(512, 0.0F);
  x[300] = 1.0F;
  for (const bool root : {false, true}) {
    EXPECT_EQ(round_trip(StateType::kInt8, root, x), x);
  }
}

TEST(StoredState, NoSecondMomentBecomesZero) {
  for (const float largest : {1e-30F, 1e-9F, 1.0F, 1e30F, kLargest}) {
    Floats x(256);
    for (int i = 0; i < 256; ++i) x[i] = std::max(std::ldexp(largest, -i), 0x1p-149F);
    const Floats got = round_trip(StateType::kInt8, true, x);
    EXPECT_NEAR(got[0] / largest, 1.0F, 1e-6F);
    EXPECT_GT(*std::min_element(got.begin(), got.end()), 0.0F) << largest;
  }
}

TEST(StoredState, ValuesThatAreNotFiniteConcernTheirBlockAlone) {
  for (const float bad : {kInfinity, -kInfinity, kNaN}) {
    for (const size_t place : {0, 255, 256, 511, 599}) {
      Floats x(600, 0.5F);
      x[place] = bad;
      for_each_setting([&] {
        const Floats got = round_trip(StateType::kInt8, false, x);
        for (size_t i = 0; i < x.size(); ++i) {
          ASSERT_EQ(std::isnan(got[i]), i / 256 == place / 256) << i << " beside " << place;
          ASSERT_TRUE(std::isnan(got[i]) || got[i] == 0.5F);
        }
      });
    }
  }
  // A second moment that overflows becomes the largest one.
  for_each_setting([&] {
    Floats v(40, 1e38F);
    v[0] = kInfinity;
    v[2] = 0.0F;
    const Floats got = round_trip(StateType::kInt8, true, v);
    EXPECT_GT(got[0], 0.9999F * kLargest);
    EXPECT_TRUE(std::isfinite(got[0]));
    EXPECT_NEAR(got[1] / 1e38F, 1.0F, 0.02F);
    EXPECT_EQ(got[2], 0.0F);
    EXPECT_TRUE(std::isnan(round_trip(StateType::kInt8, true, {kNaN, 1.0F})[1]));
  });
}

TEST(StoredState, RefusesWhatItCannotDo) {
  float x = 0.0F;
  EXPECT_THROW(encode_state(StateType::kInt8, true, &x, -1, &x), c10::Error);
  EXPECT_THROW(encode_state(StateType::kInt8, true, nullptr, 1, &x), c10::Error);
  EXPECT_THROW(decode_state(StateType::kBFloat16, true, nullptr, 1, &x), c10::Error);
  EXPECT_THROW(state_bytes(static_cast<StateType>(3), 1), c10::Error);
  encode_state(StateType::kInt8, true, nullptr, 0, nullptr);
}

// The arrays of one segment.
struct Training {
  Training(StateType type, int64_t numel)
      : type(type),
        numel(numel),
        master(static_cast<size_t>(numel), 1.0F),
        gradient(static_cast<size_t>(numel), 0.0F),
        first(stored_memory(type, numel)),
        second(stored_memory(type, numel)) {}

  void set(const Floats& averages, const Floats& moments) {
    first = encoded(type, false, averages);
    second = encoded(type, true, moments);
  }
  Floats averages() const { return decoded(type, false, first, numel); }
  Floats moments() const { return decoded(type, true, second, numel); }

  void adam(const AdamOptions& options) {
    AdamSegment s;
    s.master = master.data();
    s.exp_avg = first.data();
    s.exp_avg_sq = second.data();
    s.gradient = gradient.data();
    s.numel = numel;
    s.step = 1 + options.noise_step;
    s.state_type = type;
    adam_step(s, options, nullptr, nullptr, ScalarType::Float, Stream{});
  }
  void lion(const LionOptions& options) {
    LionSegment s;
    s.master = master.data();
    s.exp_avg = first.data();
    s.gradient = gradient.data();
    s.numel = numel;
    s.state_type = type;
    lion_step(s, options, nullptr, nullptr, ScalarType::Float, Stream{});
  }

  StateType type;
  int64_t numel;
  Floats master, gradient, first, second;
};

constexpr StateType kStored[] = {StateType::kBFloat16, StateType::kInt8};

// An update that leaves the state as it is but for its rounding: beta is 1 and gradients are 0.
TEST(StoredNoise, TheMeanOverManyStepsIsTheValue) {
  constexpr int kSteps = 4000;
  for (const StateType type : kStored) {
    Training run(type, 256);
    Floats x(256);
    for (int i = 0; i < 256; ++i) x[i] = (i % 2 == 0 ? 1.0F : -1.0F) * std::exp(-0.04F * i);
    Floats v(256);
    for (int i = 0; i < 256; ++i) v[i] = x[i] * x[i];
    std::vector<double> sums(256), roots(256);
    for (int step = 0; step < kSteps; ++step) {
      // The state of each step is x itself, through a momentum of 0 and gradients of x.
      run.set(Floats(256, 0.0F), Floats(256, 0.0F));
      run.gradient = x;
      run.adam({.lr = 0.0, .beta1 = 0.0, .beta2 = 0.0, .noise_step = step});
      const Floats averages = run.averages(), moments = run.moments();
      for (int i = 0; i < 256; ++i) {
        sums[i] += averages[i];
        roots[i] += type == StateType::kInt8 ? std::sqrt(moments[i]) : moments[i];
      }
    }
    for (int i = 1; i < 256; ++i) {
      // For a distance of two neighbours that is d: the largest of these differences is d / 170,
      // and with independent noise of each step d / 70. Of a root, code 1 takes all of what is
      // below it.
      const double size = std::fabs(x[i]);
      const double distance =
          type == StateType::kInt8 ? (2 * std::sqrt(size * 16129) + 1) / 16129 : size / 128;
      EXPECT_NEAR(sums[i] / kSteps, x[i], distance / 100) << i;
      const double r = type == StateType::kInt8 ? size : v[i];
      const double step =
          type == StateType::kInt8 ? (2 * std::sqrt(size * 65025) + 1) / 65025 : v[i] / 128;
      if (type == StateType::kBFloat16 || r * 65025 >= 1.0) {
        EXPECT_NEAR(roots[i] / kSteps, r, step / 100) << "root " << i;
      }
    }
  }
}

// Rounding up by a noise of 0, which one of 65,536 elements has, goes no further than the last
// code.
TEST(StoredNoise, TheLargestMagnitudesAreExactWithAnyNoise) {
  Floats x(256);
  for (size_t i = 0; i < x.size(); ++i) x[i] = i % 2 == 0 ? 1.0F : -1.0F;
  for_each_setting([&] {
    for (int step = 0; step < 2000; ++step) {
      Training run(StateType::kInt8, 256);
      run.gradient = x;
      run.adam({.lr = 0.0, .beta1 = 0.0, .beta2 = 0.0, .noise_step = step});
      ASSERT_EQ(run.averages(), x) << "step " << step;
      ASSERT_EQ(run.moments(), Floats(256, 1.0F)) << "step " << step;
    }
  });
}

// With beta2 = 0.999 a step changes v by less than half a code, so that nearest rounding would keep
// it for ever. In blocks whose scale is that of another element, roots fall to a tenth, and rise.
TEST(StoredNoise, ASlowAverageBelowTheScaleDoesNotStandStill) {
  constexpr int kSteps = 5000;
  constexpr int kNumel = 16 * 256;
  constexpr float kFrom = 0.5F;
  for (const float to : {0.05F, 0.8F}) {
    Training run(StateType::kInt8, kNumel);
    run.gradient = Floats(kNumel, to);
    Floats nearest(kNumel, kFrom * kFrom);
    for (int i = 0; i < kNumel; i += 256) run.gradient[i] = nearest[i] = 1.0F;
    run.set(Floats(kNumel, 0.0F), nearest);
    double exact = static_cast<double>(kFrom) * kFrom;
    for (int step = 0; step < kSteps; ++step) {
      run.adam({.lr = 0.0, .beta2 = 0.999, .noise_step = step});
      exact = 0.999 * exact + 0.001 * static_cast<double>(to) * to;
    }
    for (int step = 0; step < 100; ++step) {
      for (int i = 0; i < kNumel; ++i) {
        nearest[i] = 0.999F * nearest[i] + 0.001F * run.gradient[i] * run.gradient[i];
      }
      nearest = round_trip(StateType::kInt8, true, nearest);
    }
    const Floats moments = run.moments();
    double sum = 0.0, sum_of_roots = 0.0, unmoved = 0.0;
    for (int i = 0; i < kNumel; ++i) {
      if (i % 256 == 0) continue;
      sum += moments[i];
      sum_of_roots += std::sqrt(moments[i]);
      unmoved += nearest[i];
    }
    constexpr double kCount = kNumel - kNumel / 256;
    EXPECT_NEAR(sum / kCount / exact, 1.0, 0.04) << to;
    EXPECT_NEAR(sum_of_roots / kCount / std::sqrt(exact), 1.0, 0.02) << to;
    EXPECT_NEAR(unmoved / kCount / (kFrom * kFrom), 1.0, 0.02) << "nearest rounding stands still";
  }
}

TEST(StoredNoise, OtherStepsParametersAndElementsHaveOtherNoise) {
  Floats x(512);
  fill_ordinary(x.data(), 512, 5);
  for (const StateType type : kStored) {
    const auto state_of = [&](int64_t step, int64_t parameter, int64_t element) {
      Floats master(512), first = stored_memory(type, 512);
      LionSegment s;
      s.master = master.data();
      s.exp_avg = first.data();
      s.gradient = x.data();
      s.numel = 512;
      s.state_type = type;
      s.parameter = parameter;
      s.element = element;
      lion_step(s, {.beta2 = 0.5, .noise_step = step}, nullptr, nullptr, ScalarType::Float,
                Stream{});
      return first;
    };
    const Floats one = state_of(1, 0, 0);
    const auto equals_one = [&](const Floats& other) {
      const auto bytes = static_cast<size_t>(state_bytes(type, 512));
      return std::memcmp(one.data(), other.data(), bytes) == 0;
    };
    EXPECT_TRUE(equals_one(state_of(1, 0, 0)));
    EXPECT_FALSE(equals_one(state_of(2, 0, 0)));
    EXPECT_FALSE(equals_one(state_of(1, 1, 0)));
    EXPECT_FALSE(equals_one(state_of(1, 0, 256)));
  }
}

TEST(StoredUpdates, ZerosStayZeros) {
  for (const StateType type : kStored) {
    Training run(type, 600);
    const Floats before = run.first, master = run.master;
    for (int step = 0; step < 3; ++step) {
      run.adam({.weight_decay = 0.0, .noise_step = step});
      run.lion({.noise_step = step});
    }
    EXPECT_EQ(run.first, before);  // all of whose bits are 0
    EXPECT_EQ(run.second, before);
    EXPECT_EQ(run.master, master);
  }
}

// Elements with gradients that are tiny beside the largest of their block move by a few learning
// rates at most: the smallest average that is not 0, L / 16129, meets a root of at least L / 65025.
TEST(StoredUpdates, NoDenominatorBecomesZero) {
  for (const StateType type : kStored) {
    Training run(type, 256);
    run.gradient = Floats(256, 1e-7F);
    run.gradient[0] = 1.0F;
    for (int step = 0; step < 100; ++step) {
      run.adam({.lr = 1e-3, .eps = 0.0, .weight_decay = 0.0, .noise_step = step});
      for (const float p : run.master) ASSERT_NEAR(p, 1.0F, 5e-3F * static_cast<float>(step + 1));
    }
  }
}

}  // namespace
}  // namespace zero::kernels
