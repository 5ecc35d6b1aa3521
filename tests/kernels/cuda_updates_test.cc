// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Updates of parameters by CUDA kernels against the CPU: the same bits.
#include <limits>
#include <memory>

#include "kernels/adam.h"
#include "kernels/ema.h"
#include "kernels/lion.h"
#include "kernels/sgd.h"
#include "kernels/split_master.h"
#include "kernels/stored_state.h"
#include "tests/kernels/cuda_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

// Of the arrays of a segment: master, first moment or momentum, second moment, its maximum,
// gradient, working.
constexpr int kArrays = 6;
constexpr int kWorking = 5;

// Scalars that a step reads through pointers; they may be null.
struct Scalars {
  const float* coefficient = nullptr;
  const double* nonfinite = nullptr;
};

struct Adam {
  using Segment = AdamSegment;
  static constexpr int kVariants = 8;
  // `i` makes step counts differ.
  static Segment segment(float* const (&a)[kArrays], int64_t numel, int64_t i, int) {
    return {a[0], a[1], a[2], a[3], a[4], a[5], numel, i + 1, nullptr};
  }
  static void step(c10::ArrayRef<Segment> segments, int variant, const Scalars& scalars,
                   ScalarType dtype, Stream stream) {
    AdamOptions options{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6};
    options.amsgrad = (variant & 1) != 0;
    options.decoupled = (variant & 2) != 0;
    options.weight_decay = (variant & 4) != 0 ? 0.1 : 0.0;
    adam_step(segments, options, scalars.coefficient, scalars.nonfinite, dtype, stream);
  }
};

struct Sgd {
  using Segment = SgdSegment;
  static constexpr int kVariants = 8;
  static Segment segment(float* const (&a)[kArrays], int64_t numel, int64_t, int variant) {
    return {a[0], a[1], a[4], a[5], numel, (variant & 4) != 0, nullptr};
  }
  static void step(c10::ArrayRef<Segment> segments, int variant, const Scalars& scalars,
                   ScalarType dtype, Stream stream) {
    SgdOptions options{.lr = 0.1, .dampening = 0.0, .weight_decay = 0.01};
    options.momentum = (variant & 1) != 0 ? 0.9 : 0.0;
    options.nesterov = (variant & 2) != 0;
    sgd_step(segments, options, scalars.coefficient, scalars.nonfinite, dtype, stream);
  }
};

struct Lion {
  using Segment = LionSegment;
  static constexpr int kVariants = 2;
  static Segment segment(float* const (&a)[kArrays], int64_t numel, int64_t, int) {
    return {a[0], a[1], a[4], a[5], numel};
  }
  static void step(c10::ArrayRef<Segment> segments, int variant, const Scalars& scalars,
                   ScalarType dtype, Stream stream) {
    LionOptions options{.lr = 0.1};
    options.weight_decay = variant != 0 ? 0.01 : 0.0;
    lion_step(segments, options, scalars.coefficient, scalars.nonfinite, dtype, stream);
  }
};

constexpr StateType kAllTypes[] = {StateType::kFloat, StateType::kBFloat16, StateType::kInt8};

// The arrays of a segment on both sides; the master may be split: array 0 then has the lower
// halves. Array `odd` begins off its alignment to packs; kArrays means all of them, -1 none.
struct Pair {
  Pair(int64_t numel, ScalarType working_dtype, int odd, StateType type = StateType::kFloat,
       bool split = false)
      : type(type), numel(numel), split(split) {
    Buffer master = ordinary(numel, ScalarType::Float, 0);
    Buffer upper(2 * numel, 0);
    Buffer lower(2 * numel, 0);
    split_halves(master.as<float>(), numel, upper.as<void>(), lower.as<int16_t>(), Stream{});
    for (int array = 0; array < kArrays; ++array) {
      const ScalarType dtype = array == kWorking ? working_dtype : ScalarType::Float;
      Buffer values = ordinary(numel, dtype, static_cast<uint32_t>(array));
      float* floats = values.as<float>();
      // In every other block the scale of a stored average is above 1.
      for (int64_t i = 0; array != 0 && array != kWorking && i < numel; ++i) {
        if (i / kStateBlock % 2 == 1) floats[i] *= 1024.0F;
      }
      for (int64_t i = 0; (array == 2 || array == 3) && i < numel; ++i) {
        floats[i] = i % 11 == 0 ? 0.0F : floats[i] * floats[i];
      }
      int64_t alignment = size_of(dtype);
      if (array == 1 || array == 2) {
        Buffer stored(state_bytes(type, numel), 0);
        encode_state(type, array == 2, floats, numel, stored.as<void>());
        values = stored;
        alignment = type == StateType::kBFloat16 ? 2 : 4;
      }
      if (split && (array == 0 || array == kWorking)) {
        values = array == 0 ? lower : upper;
        alignment = 2;
      }
      host.push_back(values);
      const bool off = odd == array || odd == kArrays;
      device.push_back(std::make_unique<DeviceBuffer>(host.back(), off ? alignment : 0));
    }
  }
  // `i` makes places and step counts differ. Of elements [begin, end) where the state is fp32.
  template <class Rule>
  typename Rule::Segment host_segment(int64_t i, int variant, int64_t begin = 0, int64_t end = -1) {
    return segment<Rule>(host, i, variant, begin, end);
  }
  template <class Rule>
  typename Rule::Segment device_segment(int64_t i, int variant, int64_t begin = 0,
                                        int64_t end = -1) {
    return segment<Rule>(device, i, variant, begin, end);
  }
  // The number of the array that differs, or -1.
  int differing_array() {
    for (int array = 0; array < kArrays; ++array) {
      if (!device[array]->to_host().same_bytes(host[array])) return array;
    }
    return -1;
  }

  StateType type;
  int64_t numel;
  bool split;
  std::vector<Buffer> host;
  std::vector<std::unique_ptr<DeviceBuffer>> device;

 private:
  static char* memory(Buffer& buffer) { return buffer.as<char>(); }
  static char* memory(const std::unique_ptr<DeviceBuffer>& buffer) { return buffer->as<char>(); }
  template <class Rule, class Memory>
  typename Rule::Segment segment(Memory& arrays, int64_t i, int variant, int64_t begin,
                                 int64_t end) {
    float* floats[kArrays];
    for (int a = 0; a < kArrays; ++a) {
      const int64_t size = numel == 0 ? 0 : host[a].bytes() / numel;
      floats[a] = reinterpret_cast<float*>(memory(arrays[a]) + begin * size);
    }
    typename Rule::Segment made = Rule::segment(floats, end < 0 ? numel : end - begin, i, variant);
    if constexpr (requires { made.state_type; }) {
      made.state_type = type;
      made.parameter = i / 2;
      made.element = i % 3 * kStateBlock;
      if (split) {
        made.master = nullptr;
        made.remainder = reinterpret_cast<int16_t*>(floats[0]);
      }
    }
    return made;
  }
};

template <class Rule>
class CudaUpdates : public OnCuda {};
using Rules = ::testing::Types<Adam, Sgd, Lion>;
TYPED_TEST_SUITE(CudaUpdates, Rules);

// More segments of each type of state than fit into one launch; in bf16 three of four masters are
// split. Each variant has two dtypes.
TYPED_TEST(CudaUpdates, HaveTheBitsOfTheCpu) {
  using Rule = TypeParam;
  Buffer coefficient = scalar(0.37F);
  DeviceBuffer device_coefficient(coefficient, 0);
  Buffer none = scalar(0.0);
  DeviceBuffer device_none(none, 0);
  for (int d = 0; d < 3; ++d) {
    const ScalarType dtype = kTypes[d];
    for (int variant = 0; variant < Rule::kVariants; ++variant) {
      if ((variant + variant / 2 + d) % 3 == 0) continue;
      std::vector<std::unique_ptr<Pair>> pairs;
      std::vector<typename Rule::Segment> host;
      std::vector<typename Rule::Segment> device;
      for (int64_t i = 0; i < 240; ++i) {
        const int64_t numel = i / 6 < std::ssize(kCudaSizes) ? kCudaSizes[i / 6] : i;
        const bool split = dtype == ScalarType::BFloat16 && i % 4 != 1;
        pairs.push_back(std::make_unique<Pair>(numel, dtype, i % 6 >= 3 ? kArrays : -1,
                                               kAllTypes[i % 3], split));
        host.push_back(pairs.back()->template host_segment<Rule>(i, variant));
        device.push_back(pairs.back()->template device_segment<Rule>(i, variant));
      }
      for (int64_t blocks : kBlockLimits) {
        const BlockLimit limit(blocks);
        Rule::step(host, variant, {coefficient.as<float>(), none.as<double>()}, dtype, Stream{});
        Rule::step(device, variant, {device_coefficient.as<float>(), device_none.as<double>()},
                   dtype, kCuda);
        for (size_t i = 0; i < pairs.size(); ++i) {
          ASSERT_EQ(pairs[i]->differing_array(), -1)
              << c10::toString(dtype) << ", variant " << variant << ", segment " << i;
        }
      }
    }
  }
}

// What kernels are compiled for.
struct Kind {
  StateType type;
  ScalarType dtype;
  bool split;
};
constexpr Kind kKinds[] = {{StateType::kFloat, ScalarType::Float, false},
                           {StateType::kFloat, ScalarType::BFloat16, false},
                           {StateType::kFloat, ScalarType::Half, false},
                           {StateType::kBFloat16, ScalarType::Half, false},
                           {StateType::kInt8, ScalarType::Float, false},
                           {StateType::kFloat, ScalarType::BFloat16, true},
                           {StateType::kBFloat16, ScalarType::BFloat16, true},
                           {StateType::kInt8, ScalarType::BFloat16, true}};

TYPED_TEST(CudaUpdates, HaveTheBitsOfTheCpuWithEachArrayAloneOffItsAlignment) {
  using Rule = TypeParam;
  for (const Kind& kind : kKinds) {
    for (int variant = 0; variant < std::min(4, Rule::kVariants); ++variant) {
      for (int odd = 0; odd < kArrays; ++odd) {
        for (int64_t numel : {5, 2051}) {
          Pair pair(numel, kind.dtype, odd, kind.type, kind.split);
          Rule::step(pair.host_segment<Rule>(1, variant), variant, {}, kind.dtype, Stream{});
          Rule::step(pair.device_segment<Rule>(1, variant), variant, {}, kind.dtype, kCuda);
          ASSERT_EQ(pair.differing_array(), -1)
              << "kind " << &kind - kKinds << ", variant " << variant << ", array " << odd
              << ", numel " << numel;
        }
      }
    }
  }
}

TYPED_TEST(CudaUpdates, WriteNoWorkingValuesWhereWorkingIsNullOrTheMaster) {
  using Rule = TypeParam;
  for (const Kind& kind : kKinds) {
    for (bool null : {false, true}) {
      if (kind.split) continue;  // the upper half of the master
      Pair pair(1030, kind.dtype, -1, kind.type);
      auto host = pair.host_segment<Rule>(1, 1);
      auto device = pair.device_segment<Rule>(1, 1);
      host.working = null ? nullptr : host.master;
      device.working = null ? nullptr : device.master;
      Rule::step(host, 1, {}, kind.dtype, Stream{});
      Rule::step(device, 1, {}, kind.dtype, kCuda);
      ASSERT_EQ(pair.differing_array(), -1)
          << "kind " << &kind - kKinds << (null ? ", null" : ", the master");
    }
  }
}

TYPED_TEST(CudaUpdates, LeaveEveryBitWhereTheCountOfNonFiniteValuesIsNotZero) {
  using Rule = TypeParam;
  for (const Kind& kind : kKinds) {
    for (double count : {1.0, std::numeric_limits<double>::quiet_NaN()}) {
      for (int variant = 0; variant < Rule::kVariants; ++variant) {
        Pair pair(1000, kind.dtype, -1, kind.type, kind.split);
        Buffer nonfinite = scalar(count);
        DeviceBuffer device_nonfinite(nonfinite, 0);
        Rule::step(pair.device_segment<Rule>(1, variant), variant,
                   {nullptr, device_nonfinite.as<double>()}, kind.dtype, kCuda);
        EXPECT_EQ(pair.differing_array(), -1) << "kind " << &kind - kKinds << ", count " << count;
      }
    }
  }
}

constexpr StateType kStored[] = {StateType::kBFloat16, StateType::kInt8};

// Scalars that a step reads on the device: the number for the noise, the learning rate, and which
// step is the first.
template <class Rule, class Options, class Step>
void expect_noise_step_from_device(Options options, const Step& step) {
  Buffer number = scalar(123456.0), rate = scalar(0.0123), count = scalar(1.0F);
  DeviceBuffer device_number(number, 0), device_rate(rate, 0), device_count(count, 0);
  for (const StateType type : kStored) {
    Pair pair(9000, ScalarType::BFloat16, -1, type);
    Pair other(9000, ScalarType::BFloat16, -1, type);
    const BlockLimit limit(3);
    auto host = pair.template host_segment<Rule>(4, 0);
    auto device = pair.template device_segment<Rule>(4, 0);
    if constexpr (requires { host.device_step; }) {
      host.device_step = count.template as<float>();
      device.device_step = device_count.template as<float>();
    }
    options.weight_decay = 0.3;
    options.noise_step = 7;  // not looked at
    options.device_noise_step = number.template as<double>();
    options.device_lr = rate.template as<double>();
    step(host, options, nullptr, nullptr, ScalarType::BFloat16, Stream{});
    options.device_noise_step = device_number.template as<double>();
    options.device_lr = device_rate.template as<double>();
    step(device, options, nullptr, nullptr, ScalarType::BFloat16, kCuda);
    // The master of Adam has powers of its betas, in which the device may differ by an ulp.
    for (const int array : {1, 2}) {
      EXPECT_TRUE(pair.device[array]->to_host().same_bytes(pair.host[array])) << array;
    }
    // Another number rounds otherwise.
    step(
        other.template host_segment<Rule>(4, 0),
        [&] {
          Options with = options;
          with.device_noise_step = nullptr;
          with.device_lr = nullptr;
          with.lr = 0.0123;
          return with;
        }(),
        nullptr, nullptr, ScalarType::BFloat16, Stream{});
    EXPECT_FALSE(other.host[1].same_bytes(pair.host[1]));
  }
}

class CudaNoise : public OnCuda {};

TEST_F(CudaNoise, ReadsTheNumberOfTheStepOnTheDevice) {
  expect_noise_step_from_device<Adam>(AdamOptions{}, [](auto&&... a) { adam_step(a...); });
  expect_noise_step_from_device<Sgd>(SgdOptions{.momentum = 0.9},
                                     [](auto&&... a) { sgd_step(a...); });
  expect_noise_step_from_device<Lion>(LionOptions{}, [](auto&&... a) { lion_step(a...); });
}

// Infinities and NaN: which values are finite, since the bits of a NaN depend on the processor.
TEST_F(CudaNoise, ValuesThatAreNotFiniteConcernTheirBlocks) {
  for (const StateType type : kStored) {
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(), 1e25F}) {
      Pair pair(1000, ScalarType::BFloat16, -1, type);
      pair.host[4].as<float>()[300] = bad;
      pair.device[4] = std::make_unique<DeviceBuffer>(pair.host[4], 0);
      Adam::step(pair.host_segment<Adam>(1, 0), 0, {}, ScalarType::BFloat16, Stream{});
      Adam::step(pair.device_segment<Adam>(1, 0), 0, {}, ScalarType::BFloat16, kCuda);
      for (const bool root : {false, true}) {
        const int array = root ? 2 : 1;
        Buffer got = pair.device[array]->to_host();
        std::vector<float> here(1000), there(1000);
        decode_state(type, root, pair.host[array].as<void>(), 1000, here.data());
        decode_state(type, root, got.as<void>(), 1000, there.data());
        for (int i = 0; i < 1000; ++i) {
          ASSERT_EQ(ulp_distance(here[i], there[i]), 0) << i << ", root " << root << ", " << bad;
        }
      }
    }
  }
}

class CudaHalves : public OnCuda {};

// All upper halves, around ties and NaN, on and off the alignment of packs.
TEST_F(CudaHalves, HaveTheBitsOfTheCpu) {
  constexpr uint32_t kLower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  for (int64_t numel : {int64_t{0}, int64_t{1}, int64_t{1023}, int64_t{65536} * 6}) {
    Buffer master(4 * numel, 0), upper(2 * numel, 0), lower(2 * numel, 0), joined(4 * numel, 0);
    for (int64_t i = 0; i < numel; ++i) {
      master.as<uint32_t>()[i] = (static_cast<uint32_t>(i / 6) << 16) + kLower[i % 6];
    }
    split_halves(master.as<float>(), numel, upper.as<void>(), lower.as<int16_t>(), Stream{});
    join_halves(upper.as<void>(), lower.as<int16_t>(), numel, joined.as<float>(), Stream{});
    Buffer empty(2 * numel, 0);
    for (int odd = -1; odd < 3; ++odd) {
      DeviceBuffer device_master(master, odd == 0 ? 4 : 0);
      DeviceBuffer device_upper(empty, odd == 1 ? 2 : 0), device_lower(empty, odd == 2 ? 2 : 0);
      split_halves(device_master.as<float>(), numel, device_upper.as<void>(),
                   device_lower.as<int16_t>(), kCuda);
      EXPECT_TRUE(device_upper.to_host().same_bytes(upper)) << numel << ", array " << odd;
      EXPECT_TRUE(device_lower.to_host().same_bytes(lower)) << numel << ", array " << odd;
      join_halves(device_upper.as<void>(), device_lower.as<int16_t>(), numel,
                  device_master.as<float>(), kCuda);
      EXPECT_TRUE(device_master.to_host().same_bytes(joined)) << numel << ", array " << odd;
    }
  }
}

class CudaEma : public OnCuda {};

constexpr int kAverage = 1, kValues = 0;

struct Ema {
  using Segment = EmaSegment;
  static Segment segment(float* const (&a)[kArrays], int64_t numel, int64_t, int) {
    return {a[kAverage], a[kValues], numel};
  }
};

TEST_F(CudaEma, HasTheBitsOfTheCpu) {
  Buffer weight = scalar(0.013F);
  DeviceBuffer device_weight(weight, 0);
  // More segments than fit into one launch; of some, one array begins off its alignment.
  std::vector<std::unique_ptr<Pair>> pairs;
  std::vector<EmaSegment> host, device;
  for (int64_t i = 0; i < 300; ++i) {
    const int64_t numel = i < std::ssize(kCudaSizes) ? kCudaSizes[i] : i;
    constexpr int kOdd[] = {-1, kAverage, kValues, kArrays};
    pairs.push_back(std::make_unique<Pair>(numel, ScalarType::Float, kOdd[i % 4]));
    host.push_back(pairs.back()->host_segment<Ema>(i, 0));
    device.push_back(pairs.back()->device_segment<Ema>(i, 0));
  }
  for (int64_t blocks : kBlockLimits) {
    for (const bool by_address : {false, true}) {
      const BlockLimit limit(blocks);
      ema_step(host, 0.013F, nullptr, Stream{});
      ema_step(device, by_address ? 1.0F : 0.013F, by_address ? device_weight.as<float>() : nullptr,
               kCuda);
      for (size_t i = 0; i < pairs.size(); ++i) {
        ASSERT_EQ(pairs[i]->differing_array(), -1)
            << "segment " << i << ", by address " << by_address;
      }
    }
  }
}

TEST_F(CudaEma, AWeightOfZeroWritesNothing) {
  Buffer none = scalar(0.0F);
  DeviceBuffer device_none(none, 0);
  constexpr int64_t kNumel = 1030;
  Pair pair(kNumel, ScalarType::Float, -1);
  Buffer values = pair.host[kValues];
  values.as<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  DeviceBuffer device_values(values, 0);
  EmaSegment segment = pair.device_segment<Ema>(0, 0);
  segment.values = device_values.as<float>();
  ema_step(segment, 0.0F, nullptr, kCuda);
  ema_step(segment, 0.5F, device_none.as<float>(), kCuda);
  EXPECT_EQ(pair.differing_array(), -1);
}

class CudaRates : public OnCuda {};

// An update with the learning rate by value has the bits of one that reads it on the device.
template <class Rule, class Options, class Step>
void expect_rate_from_device(Options options, const Step& step) {
  constexpr int64_t kNumel = 9000;
  options.lr = 0.0123;
  options.weight_decay = 0.3;
  Buffer count = scalar(3.0F), rate = scalar(options.lr);
  DeviceBuffer device_count(count, 0), device_rate(rate, 0);
  Pair expected(kNumel, ScalarType::BFloat16, -1), got(kNumel, ScalarType::BFloat16, -1);
  const BlockLimit limit(3);
  const auto run = [&](Pair& pair) {
    auto segment = pair.device_segment<Rule>(0, /*variant=*/0);
    if constexpr (requires { segment.device_step; }) {
      segment.device_step = device_count.template as<float>();
    }
    step(segment, options, nullptr, nullptr, ScalarType::BFloat16, kCuda);
  };
  run(expected);
  options.lr = 1.0;
  options.device_lr = device_rate.template as<double>();
  run(got);
  for (int array = 0; array < kArrays; ++array) {
    EXPECT_TRUE(got.device[array]->to_host().same_bytes(expected.device[array]->to_host()))
        << "array " << array;
  }
}

TEST_F(CudaRates, AreReadOnTheDeviceWhereTheyAreGivenThere) {
  const auto adam = [](auto&&... a) { adam_step(a...); };
  expect_rate_from_device<Adam>(AdamOptions{.decoupled = true}, adam);
  expect_rate_from_device<Adam>(AdamOptions{.decoupled = false}, adam);
  expect_rate_from_device<Sgd>(SgdOptions{.momentum = 0.9}, [](auto&&... a) { sgd_step(a...); });
  expect_rate_from_device<Lion>(LionOptions{}, [](auto&&... a) { lion_step(a...); });
}

class CudaStepCounts : public OnCuda {};

// Neighbouring tiles of a block have different counts.
TEST_F(CudaStepCounts, AdamReadsThemOnTheDevice) {
  constexpr int64_t kNumel = 60000;
  constexpr int64_t kLength = 3000;
  const int64_t counts[2] = {3, 500};
  Pair pair(kNumel, ScalarType::BFloat16, -1);
  Buffer steps[2] = {scalar(3.0F), scalar(500.0F)};
  DeviceBuffer device_steps[2] = {DeviceBuffer(steps[0], 0), DeviceBuffer(steps[1], 0)};
  std::vector<AdamSegment> host;
  std::vector<AdamSegment> device;
  for (int64_t i = 0; i < kNumel / kLength; ++i) {
    const int64_t which = i / 3 % 2;
    host.push_back(
        pair.host_segment<Adam>(counts[which] - 1, /*variant=*/0, i * kLength, (i + 1) * kLength));
    device.push_back(pair.device_segment<Adam>(0, /*variant=*/0, i * kLength, (i + 1) * kLength));
    device.back().device_step = device_steps[which].as<float>();
  }
  const BlockLimit limit(3);
  adam_step(host, {}, nullptr, nullptr, ScalarType::BFloat16, Stream{});
  adam_step(device, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda);
  Buffer got = pair.device[0]->to_host();
  for (int64_t i = 0; i < kNumel; ++i) {
    // An ulp in a scalar moves the update, about lr, by an ulp.
    ASSERT_NEAR(got.as<float>()[i], pair.host[0].as<float>()[i], 1e-6) << i;
  }
}

TEST_F(CudaStepCounts, SgdReadsOnTheDeviceWhichStepIsTheFirst) {
  constexpr int64_t kNumel = 9000;
  for (const bool first : {true, false}) {
    Pair pair(kNumel, ScalarType::BFloat16, -1);
    Buffer count = scalar(first ? 1.0F : 2.0F);
    DeviceBuffer device_count(count, 0);
    SgdSegment host = pair.host_segment<Sgd>(0, /*variant=*/0);
    SgdSegment device = pair.device_segment<Sgd>(0, /*variant=*/0);
    host.first_step = first;
    device.first_step = !first;
    device.device_step = device_count.as<float>();
    const SgdOptions options{.momentum = 0.9};
    sgd_step(host, options, nullptr, nullptr, ScalarType::BFloat16, Stream{});
    sgd_step(device, options, nullptr, nullptr, ScalarType::BFloat16, kCuda);
    ASSERT_EQ(pair.differing_array(), -1) << first;
  }
}

}  // namespace
}  // namespace zero::kernels
