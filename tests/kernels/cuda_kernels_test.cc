// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// CUDA casts, sums of rows and norms against the CPU: the same bits, except for sums of powers,
// which may differ by the rounding of additions in double.
#include <memory>
#include <string>

#include "kernels/exact_sum.h"
#include "kernels/norm.h"
#include "kernels/sum_rows.h"
#include "tests/kernels/cuda_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

class CudaKernels : public OnCuda {};

// Array `odd` of source, destination and addend begins off its alignment; -1 means none.
void expect_cast_of_the_cpu(ScalarType from, ScalarType to, int64_t numel, const std::string& added,
                            int odd) {
  Buffer source = ordinary(numel, from, 1);
  Buffer destination = ordinary(numel, to, 2);
  Buffer other = ordinary(numel, to, 3);
  DeviceBuffer device_source(source, odd == 0 ? size_of(from) : 0);
  DeviceBuffer device_destination(destination, odd == 1 ? size_of(to) : 0);
  DeviceBuffer device_other(other, odd == 2 ? size_of(to) : 0);
  const auto addend = [&](void* destination, void* other) -> const void* {
    if (added == "nothing") return nullptr;
    return added == "another array" ? other : destination;
  };
  cast_copy(source.as<void>(), from, destination.as<void>(), to, numel,
            addend(destination.as<void>(), other.as<void>()), Stream{});
  cast_copy(device_source.as<void>(), from, device_destination.as<void>(), to, numel,
            addend(device_destination.as<void>(), device_other.as<void>()), kCuda);
  ASSERT_TRUE(device_destination.to_host().same_bytes(destination))
      << c10::toString(from) << " to " << c10::toString(to) << ", numel " << numel << ", plus "
      << added << ", off its alignment " << odd;
}

TEST_F(CudaKernels, CastCopyHasTheBitsOfTheCpu) {
  for (int64_t blocks : kBlockLimits) {
    const BlockLimit limit(blocks);
    for (ScalarType from : kTypes) {
      for (ScalarType to : kTypes) {
        for (int64_t numel : kCudaSizes) {
          expect_cast_of_the_cpu(from, to, numel, "nothing", -1);
          expect_cast_of_the_cpu(from, to, numel, "the destination", -1);
        }
      }
    }
  }
}

TEST_F(CudaKernels, CastCopyWithEachArrayAloneOffItsAlignment) {
  for (ScalarType from : kTypes) {
    for (ScalarType to : kTypes) {
      for (int64_t numel : {5, 1000, 2053}) {
        for (int odd : {-1, 0, 1, 2}) {
          for (const std::string added : {"nothing", "the destination", "another array"}) {
            expect_cast_of_the_cpu(from, to, numel, added, odd);
          }
        }
      }
    }
  }
}

// Every pattern of 16 bits; of fp32, all exponents, ties, subnormals and values that are not
// finite.
TEST_F(CudaKernels, CastCopyOfEveryBitPatternIsThatOfTheCpu) {
  constexpr int64_t kNumel = 65536;
  for (ScalarType from : kTypes) {
    for (ScalarType to : kTypes) {
      Buffer source(kNumel * size_of(from), 0);
      if (from == ScalarType::Float) {
        fill_any_bits(source.as<float>(), kNumel, 7);
      } else {
        for (int64_t i = 0; i < kNumel; ++i) {
          source.as<uint16_t>()[i] = static_cast<uint16_t>(i);
        }
      }
      Buffer destination(kNumel * size_of(to), 0);
      DeviceBuffer device_source(source, 0);
      DeviceBuffer device_destination(destination, 0);
      cast_copy(source.as<void>(), from, destination.as<void>(), to, kNumel, nullptr, Stream{});
      cast_copy(device_source.as<void>(), from, device_destination.as<void>(), to, kNumel, nullptr,
                kCuda);
      // In fp32, for the bits of a NaN may differ.
      const auto widened = [&](Buffer narrow) {
        Buffer wide(4 * kNumel, 0);
        cast_copy(narrow.as<void>(), to, wide.as<void>(), ScalarType::Float, kNumel, nullptr,
                  Stream{});
        return wide;
      };
      Buffer expected = widened(destination);
      Buffer got = widened(device_destination.to_host());
      for (int64_t i = 0; i < kNumel; ++i) {
        const float a = expected.as<float>()[i];
        const float b = got.as<float>()[i];
        ASSERT_TRUE(std::isnan(a) ? std::isnan(b)
                                  : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b))
            << c10::toString(from) << " to " << c10::toString(to) << ", element " << i;
      }
    }
  }
}

TEST_F(CudaKernels, MoreSpansThanFitIntoOneLaunch) {
  std::vector<std::unique_ptr<DeviceBuffer>> memory;
  std::vector<CopySpan> spans;
  std::vector<Buffer> sources;
  std::vector<Buffer> expected;
  for (int64_t i = 0; i < 500; ++i) {
    const int64_t numel = i % 7 == 0 ? 0 : i * 37 % 9000;
    Buffer source = ordinary(numel, ScalarType::Float, static_cast<uint32_t>(i));
    Buffer destination(2 * numel, 0);
    memory.push_back(std::make_unique<DeviceBuffer>(source, 4 * (i % 2)));
    memory.push_back(std::make_unique<DeviceBuffer>(destination, 2 * (i % 3)));
    void* const to = memory[2 * i + 1]->as<void>();
    spans.push_back({memory[2 * i]->as<void>(), to, numel, /*addend=*/to});
    sources.push_back(source);
    expected.push_back(destination);
  }
  // First without addends, then with the results as addends.
  for (const bool with_addends : {false, true}) {
    cast_copy_spans(spans, ScalarType::Float, ScalarType::Half, with_addends, kCuda);
    for (int64_t i = 0; i < 500; ++i) {
      void* const to = expected[i].as<void>();
      cast_copy(sources[i].as<void>(), ScalarType::Float, to, ScalarType::Half, spans[i].numel,
                with_addends ? to : nullptr, Stream{});
      ASSERT_TRUE(memory[2 * i + 1]->to_host().same_bytes(expected[i])) << "span " << i;
    }
  }
}

// Array `odd` of the received rows, the own row and the shard begins off its alignment.
void expect_sum_of_the_cpu(ScalarType dtype, int64_t world, int64_t numel, bool accumulate,
                           int odd) {
  Buffer received = ordinary(world * numel, dtype, 3);
  Buffer own = ordinary(numel, dtype, 4);
  Buffer shard = ordinary(numel, ScalarType::Float, 5);
  DeviceBuffer device_received(received, odd == 0 ? size_of(dtype) : 0);
  DeviceBuffer device_own(own, odd == 1 ? size_of(dtype) : 0);
  DeviceBuffer device_shard(shard, odd == 2 ? 4 : 0);
  SumRowsArgs args;
  args.received = received.as<void>();
  args.own = own.as<void>();
  args.world_size = world;
  args.own_rank = world / 2;
  args.numel = numel;
  args.dtype = dtype;
  args.scale = 0.3F;
  args.shard = shard.as<float>();
  args.accumulate = accumulate;
  sum_rows(args, Stream{});
  args.received = device_received.as<void>();
  args.own = device_own.as<void>();
  args.shard = device_shard.as<float>();
  sum_rows(args, kCuda);
  ASSERT_TRUE(device_shard.to_host().same_bytes(shard))
      << c10::toString(dtype) << ", world " << world << ", numel " << numel << ", accumulate "
      << accumulate << ", off its alignment " << odd;
}

TEST_F(CudaKernels, SumRowsHasTheBitsOfTheCpu) {
  for (int64_t blocks : kBlockLimits) {
    const BlockLimit limit(blocks);
    for (ScalarType dtype : kTypes) {
      for (int64_t world : {1, 2, 5}) {
        for (int64_t numel : kCudaSizes) {
          expect_sum_of_the_cpu(dtype, world, numel, /*accumulate=*/false, -1);
          expect_sum_of_the_cpu(dtype, world, numel, /*accumulate=*/true, -1);
        }
      }
    }
  }
}

TEST_F(CudaKernels, SumRowsWithEachArrayAloneOffItsAlignment) {
  for (ScalarType dtype : kTypes) {
    for (int64_t numel : {8, 1000, 2056}) {
      for (int odd : {0, 1, 2}) {
        expect_sum_of_the_cpu(dtype, 3, numel, /*accumulate=*/false, odd);
        expect_sum_of_the_cpu(dtype, 3, numel, /*accumulate=*/true, odd);
      }
    }
  }
}

// The sum of |x|^p and the number of values that are not finite, added to {5, 1}.
std::vector<double> device_sums(const std::vector<ConstSpan>& spans, double p) {
  Buffer start(16, 0);
  start.as<double>()[0] = 5.0;
  start.as<double>()[1] = 1.0;
  DeviceBuffer result(start, 0);
  Buffer garbage(kNormWorkspace * 8, 0);
  std::fill_n(garbage.as<double>(), kNormWorkspace, NAN);
  DeviceBuffer workspace(garbage, 0);
  sum_of_abs_powers(spans, p, result.as<double>(), workspace.as<double>(), kCuda);
  Buffer got = result.to_host();
  return {got.as<double>()[0], got.as<double>()[1]};
}

struct Spans {
  void add(Buffer values, int64_t offset) {
    host.push_back(std::make_unique<Buffer>(values));
    device.push_back(std::make_unique<DeviceBuffer>(values, offset));
    const int64_t numel = values.bytes() / 4;
    on_host.push_back({host.back()->as<float>(), numel});
    on_device.push_back({device.back()->as<float>(), numel});
  }
  std::vector<std::unique_ptr<Buffer>> host;
  std::vector<std::unique_ptr<DeviceBuffer>> device;
  std::vector<ConstSpan> on_host;
  std::vector<ConstSpan> on_device;
};

TEST_F(CudaKernels, NormsMatchTheCpu) {
  for (int64_t count : {3, 200}) {
    for (bool bad : {false, true}) {
      Spans spans;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t numel = count == 200 ? i % 150 : 9001;
        Buffer values = ordinary(numel, ScalarType::Float, static_cast<uint32_t>(i));
        if (bad && numel > 50) {
          values.as<float>()[numel / 2] = i % 2 == 0 ? INFINITY : NAN;
        }
        spans.add(values, 4 * (i % 2));
      }
      for (double p : {1.0, 2.0, 3.0}) {
        double expected[2] = {5.0, 1.0};
        sum_of_abs_powers(spans.on_host, p, expected, nullptr, Stream{});
        const std::vector<double> got = device_sums(spans.on_device, p);
        ASSERT_EQ(got[1], expected[1]);
        if (!bad) {
          ASSERT_NEAR(got[0], expected[0], 1e-14 * expected[0]) << "p " << p;
        }
      }
      int64_t expected = 0;
      Buffer start = scalar(int64_t{0});
      DeviceBuffer result(start, 0);
      max_abs_bits(spans.on_host, &expected, Stream{});
      max_abs_bits(spans.on_device, result.as<int64_t>(), kCuda);
      Buffer got = result.to_host();
      ASSERT_EQ(*got.as<int64_t>(), expected);
    }
  }
}

TEST_F(CudaKernels, MaxAbsBitsIsFoundWhereverItIsAndNeverLowered) {
  constexpr int64_t kNumel = 5000;
  for (int64_t position : {0, 1, 31, 32, 1023, 1024, 4095, 4999}) {
    Buffer values = ordinary(kNumel, ScalarType::Float, 1);
    values.as<float>()[position] = -100.0F;
    DeviceBuffer device(values, 0);
    Buffer start = scalar(int64_t{0});
    DeviceBuffer result(start, 0);
    max_abs_bits(ConstSpan{device.as<float>(), kNumel}, result.as<int64_t>(), kCuda);
    max_abs_bits(ConstSpan{device.as<float>(), position}, result.as<int64_t>(), kCuda);
    Buffer got = result.to_host();
    EXPECT_EQ(*got.as<int64_t>(), std::bit_cast<int32_t>(100.0F)) << position;
  }
}

TEST_F(CudaKernels, MaxAbsBitsOfZerosIsZero) {
  Buffer zeros(4 * 100, 0);
  std::memset(zeros.as<void>(), 0, 4 * 100);
  DeviceBuffer device(zeros, 0);
  Buffer start = scalar(int64_t{0});
  DeviceBuffer result(start, 0);
  max_abs_bits(ConstSpan{device.as<float>(), 100}, result.as<int64_t>(), kCuda);
  Buffer got = result.to_host();
  EXPECT_EQ(*got.as<int64_t>(), 0);
}

TEST_F(CudaKernels, SumsHaveTheSameBitsOnEveryNumberOfBlocks) {
  Spans spans;
  for (int64_t numel : {16001, 5, 8193}) {
    spans.add(ordinary(numel, ScalarType::Float, static_cast<uint32_t>(numel)), 0);
  }
  for (double p : {2.0, 3.0}) {
    const std::vector<double> expected = device_sums(spans.on_device, p);
    for (int64_t blocks : {1, 2, 3, 7, 16}) {
      const BlockLimit limit(blocks);
      ASSERT_EQ(device_sums(spans.on_device, p), expected);
    }
  }
}

TEST_F(CudaKernels, MoreTilesThanTheWorkspaceHasSlotsFor) {
  constexpr int64_t kNumel = 30001;
  Buffer values = ordinary(kNumel, ScalarType::Float, 3);
  DeviceBuffer device(values, 0);
  const ConstSpan span{device.as<float>(), kNumel};
  double expected[2] = {};
  sum_of_squares(ConstSpan{values.as<float>(), kNumel}, expected, nullptr, Stream{});
  for (int64_t slots : {1, 2, 7, 29}) {
    Buffer zeros = ordinary(4, ScalarType::Float, 0);
    std::memset(zeros.as<void>(), 0, 16);
    DeviceBuffer result(zeros, 0);
    Buffer garbage = ordinary(4 * slots, ScalarType::Float, 4);
    DeviceBuffer workspace(garbage, 0);
    ASSERT_EQ(cuda::sum_of_abs_powers(&span, 1, 2.0, result.as<double>(), workspace.as<double>(),
                                      2 * slots, nullptr),
              nullptr);
    Buffer got = result.to_host();
    EXPECT_NEAR(got.as<double>()[0], expected[0], 1e-14 * expected[0]) << slots << " slots";
    EXPECT_EQ(got.as<double>()[1], 0.0);
  }
}

TEST_F(CudaKernels, SumsWithoutAWorkspaceThrow) {
  Buffer values = ordinary(8, ScalarType::Float, 1);
  DeviceBuffer device(values, 0);
  Buffer start(16, 0);
  DeviceBuffer result(start, 0);
  const ConstSpan span{device.as<float>(), 8};
  EXPECT_THROW(sum_of_squares(span, result.as<double>(), nullptr, kCuda), c10::Error);
}

std::vector<int64_t> host_sum(const std::vector<ConstSpan>& spans) {
  std::vector<int64_t> sum(kExactNumel);
  add_squares_exactly(spans, sum.data(), Stream{});
  return sum;
}

// Added in so many calls, of neighbours in the list.
std::vector<int64_t> device_sum(const std::vector<ConstSpan>& spans, size_t calls = 1) {
  Buffer zeros(kExactNumel * 8, 0);
  std::fill_n(zeros.as<int64_t>(), kExactNumel, 0);
  DeviceBuffer sum(zeros, 0);
  for (size_t call = 0; call < calls; ++call) {
    const size_t begin = spans.size() * call / calls;
    const size_t end = spans.size() * (call + 1) / calls;
    add_squares_exactly({spans.data() + begin, end - begin}, sum.as<int64_t>(), kCuda);
  }
  Buffer got = sum.to_host();
  return {got.as<int64_t>(), got.as<int64_t>() + kExactNumel};
}

uint64_t bits_of_value(std::vector<int64_t> sum, bool cuda) {
  Buffer limbs(kExactNumel * 8, 0);
  std::copy(sum.begin(), sum.end(), limbs.as<int64_t>());
  Buffer value = scalar(-1.0);
  if (!cuda) {
    value_of_exact_sum(limbs.as<int64_t>(), value.as<double>(), Stream{});
    return *value.as<uint64_t>();
  }
  DeviceBuffer device_limbs(limbs, 0);
  DeviceBuffer device_value(value, 0);
  value_of_exact_sum(device_limbs.as<int64_t>(), device_value.as<double>(), kCuda);
  EXPECT_TRUE(device_limbs.to_host().same_bytes(limbs));
  return *device_value.to_host().as<uint64_t>();
}

// Exponents that differ from block to block, subnormal squares and the largest among them.
Buffer wide(int64_t numel, uint32_t seed) {
  Buffer values = ordinary(numel, ScalarType::Float, seed);
  std::mt19937 generator(seed);
  int exponent = 0;
  for (int64_t i = 0; i < numel; ++i) {
    if (i % kExactBlock == 0) exponent = static_cast<int>(generator() % 270) - 147;
    values.as<float>()[i] = std::ldexp(values.as<float>()[i], exponent);
  }
  return values;
}

TEST_F(CudaKernels, ExactSumsHaveTheBitsOfTheCpu) {
  for (int64_t blocks : kBlockLimits) {
    const BlockLimit limit(blocks);
    for (int64_t numel : kCudaSizes) {
      for (bool any : {false, true}) {
        Spans spans;
        Buffer values = wide(numel, static_cast<uint32_t>(numel));
        if (any)
          fill_any_bits(values.as<float>(), numel, 11);  // most blocks have infinities or NaN
        spans.add(values, 4 * (numel % 2));
        const std::vector<int64_t> expected = host_sum(spans.on_host);
        ASSERT_EQ(device_sum(spans.on_device), expected) << "numel " << numel;
        ASSERT_EQ(bits_of_value(expected, true), bits_of_value(expected, false));
      }
    }
  }
}

TEST_F(CudaKernels, ExactSumsOfCutsOrdersAndCallsAreThoseOfTheWhole) {
  constexpr int64_t kNumel = 240 * kExactBlock + 77;
  Spans whole;
  whole.add(wide(kNumel, 12), 4);
  const std::vector<int64_t> expected = host_sum(whole.on_host);
  ASSERT_EQ(device_sum(whole.on_device), expected);
  std::mt19937 generator(13);
  for (int64_t longest : {1, 50}) {
    std::vector<ConstSpan> spans;
    for (int64_t begin = 0; begin < kNumel;) {
      const int64_t blocks = 1 + static_cast<int64_t>(generator()) % longest;
      const int64_t numel = std::min(kExactBlock * blocks, kNumel - begin);
      spans.push_back({whole.on_device[0].data + begin, numel});
      spans.push_back({nullptr, 0});
      begin += numel;
    }
    std::shuffle(spans.begin(), spans.end(), generator);
    for (int64_t limit : kBlockLimits) {
      const BlockLimit blocks(limit);
      for (size_t calls : {1, 3}) {
        ASSERT_EQ(device_sum(spans, calls), expected) << "up to " << longest << ", calls " << calls;
      }
    }
  }
}

TEST_F(CudaKernels, InfinitiesAndNansAreCountedInExactSums) {
  Spans spans;
  Buffer values = wide(3000, 14);
  for (int64_t i : {0, 31, 255, 2999}) values.as<float>()[i] = i % 2 == 0 ? INFINITY : -INFINITY;
  for (int64_t i : {1, 1023, 1024, 1055, 2998}) values.as<float>()[i] = NAN;
  spans.add(values, 0);
  const std::vector<int64_t> got = device_sum(spans.on_device);
  EXPECT_EQ(got[kExactLimbs], 4);
  EXPECT_EQ(got[kExactLimbs + 1], 5);
  EXPECT_EQ(got, host_sum(spans.on_host));
  std::vector<int64_t> infinite = got;
  infinite[kExactLimbs + 1] = 0;
  for (const std::vector<int64_t>& sum : {got, infinite}) {
    EXPECT_EQ(bits_of_value(sum, true), bits_of_value(sum, false));
  }
}

// Limbs that are sums over ranks, of all sizes from one bit on.
TEST_F(CudaKernels, ValuesOfExactSumsHaveTheBitsOfTheCpu) {
  std::mt19937_64 generator(15);
  for (int i = 0; i < 500; ++i) {
    std::vector<int64_t> sum(kExactNumel);
    for (int64_t limb = i % kExactLimbs; limb < kExactLimbs; limb += 1 + i % 5) {
      sum[limb] = static_cast<int64_t>(generator() >> (11 + generator() % 53));
    }
    ASSERT_EQ(bits_of_value(sum, true), bits_of_value(sum, false)) << "sum " << i;
  }
}

TEST_F(CudaKernels, FillZeroClearsExactlyTheBytesGiven) {
  Buffer host = ordinary(1000, ScalarType::Float, 1);
  DeviceBuffer device(host, 0);
  fill_zero(device.as<char>() + 3, 1001, kCuda);
  std::memset(host.as<char>() + 3, 0, 1001);
  EXPECT_TRUE(device.to_host().same_bytes(host));
}

}  // namespace
}  // namespace zero::kernels
