// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Every CUDA kernel against the CPU: the same bits, except for sums of powers,
// which may differ by the rounding of additions in double. Skipped, with the
// reason, where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>

#include "kernels/adam.h"
#include "kernels/cast.h"
#include "kernels/lion.h"
#include "kernels/norm.h"
#include "kernels/sgd.h"
#include "kernels/sum_rows.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

const Stream kCuda{true, nullptr};
const std::vector<ScalarType> kTypes = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
const std::vector<int64_t> kCudaSizes = {0, 1, 3, 7, 8, 9, 1000, 8191, 8192, 8193, 100003};

class CudaKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(error);
    }
  }
};

// Device memory that begins as far from an aligned address as the host buffer it copies.
class DeviceBuffer {
 public:
  DeviceBuffer(Buffer& host, int64_t offset) : bytes_(host.bytes()), offset_(offset) {
    EXPECT_EQ(cudaMalloc(&memory_, static_cast<size_t>(bytes_ + offset_ + 64)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(at(0), host.as<void>(), static_cast<size_t>(bytes_), cudaMemcpyDefault),
              cudaSuccess);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(memory_); }

  template <class T>
  T* as() {
    return static_cast<T*>(static_cast<void*>(at(0)));
  }
  Buffer to_host() {
    Buffer host(bytes_, 0);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(host.as<void>(), at(0), static_cast<size_t>(bytes_), cudaMemcpyDefault),
              cudaSuccess);
    return host;
  }

 private:
  char* at(int64_t byte) { return static_cast<char*>(memory_) + offset_ + byte; }
  void* memory_ = nullptr;
  int64_t bytes_;
  int64_t offset_;
};

Buffer ordinary(int64_t numel, ScalarType dtype, uint32_t seed) {
  Buffer wide(4 * numel, 0);
  fill_ordinary(wide.as<float>(), numel, seed);
  Buffer buffer(numel * size_of(dtype), 0);
  cast_copy(wide.as<void>(), ScalarType::Float, buffer.as<void>(), dtype, numel, nullptr, Stream{});
  return buffer;
}

template <class T>
Buffer scalar(T value) {
  Buffer buffer(sizeof(T), 0);
  *buffer.as<T>() = value;
  return buffer;
}

TEST_F(CudaKernels, CastCopyHasTheBitsOfTheCpu) {
  for (ScalarType from : kTypes) {
    for (ScalarType to : kTypes) {
      for (int64_t numel : kCudaSizes) {
        for (const std::string added : {"nothing", "the destination", "another array"}) {
          for (int64_t offset : {0, 1}) {
            Buffer source = ordinary(numel, from, 1);
            Buffer destination = ordinary(numel, to, 2);
            Buffer other = ordinary(numel, to, 3);
            DeviceBuffer device_source(source, offset * size_of(from));
            DeviceBuffer device_destination(destination, 0);
            DeviceBuffer device_other(other, offset * size_of(to));
            const auto addend = [&](void* destination, void* other) -> const void* {
              if (added == "nothing") return nullptr;
              return added == "another array" ? other : destination;
            };
            cast_copy(source.as<void>(), from, destination.as<void>(), to, numel,
                      addend(destination.as<void>(), other.as<void>()), Stream{});
            cast_copy(device_source.as<void>(), from, device_destination.as<void>(), to, numel,
                      addend(device_destination.as<void>(), device_other.as<void>()), kCuda);
            ASSERT_TRUE(device_destination.to_host().same_bytes(destination))
                << c10::toString(from) << " to " << c10::toString(to) << " numel " << numel;
          }
        }
      }
    }
  }
}

TEST_F(CudaKernels, MoreSpansThanFitIntoOneLaunch) {
  std::vector<std::unique_ptr<DeviceBuffer>> memory;
  std::vector<CopySpan> spans;
  std::vector<Buffer> expected;
  for (int64_t i = 0; i < 500; ++i) {
    const int64_t numel = i % 7 == 0 ? 0 : i * 37 % 9000;
    Buffer source = ordinary(numel, ScalarType::Float, static_cast<uint32_t>(i));
    Buffer destination(2 * numel, 0);
    memory.push_back(std::make_unique<DeviceBuffer>(source, 4 * (i % 2)));
    memory.push_back(std::make_unique<DeviceBuffer>(destination, 2 * (i % 3)));
    spans.push_back({memory[2 * i]->as<void>(), memory[2 * i + 1]->as<void>(), numel});
    cast_copy(source.as<void>(), ScalarType::Float, destination.as<void>(), ScalarType::Half, numel,
              nullptr, Stream{});
    expected.push_back(destination);
  }
  cast_copy_spans(spans, ScalarType::Float, ScalarType::Half, kCuda);
  for (int64_t i = 0; i < 500; ++i) {
    ASSERT_TRUE(memory[2 * i + 1]->to_host().same_bytes(expected[i])) << "span " << i;
  }
}

TEST_F(CudaKernels, SumRowsHasTheBitsOfTheCpu) {
  for (ScalarType dtype : kTypes) {
    for (int64_t world : {1, 2, 5}) {
      for (int64_t numel : kCudaSizes) {
        for (bool accumulate : {false, true}) {
          Buffer received = ordinary(world * numel, dtype, 3);
          Buffer own = ordinary(numel, dtype, 4);
          Buffer shard = ordinary(numel, ScalarType::Float, 5);
          DeviceBuffer device_received(received, 0);
          DeviceBuffer device_own(own, 0);
          DeviceBuffer device_shard(shard, 0);
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
              << c10::toString(dtype) << " world " << world << " numel " << numel;
        }
      }
    }
  }
}

TEST_F(CudaKernels, NormsMatchTheCpu) {
  for (int64_t count : {1, 3, 400}) {
    for (bool bad : {false, true}) {
      std::vector<std::unique_ptr<DeviceBuffer>> memory;
      std::vector<Buffer> host;
      std::vector<ConstSpan> host_spans;
      std::vector<ConstSpan> device_spans;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t numel = count == 400 ? i % 300 : 50001;
        host.push_back(ordinary(numel, ScalarType::Float, static_cast<uint32_t>(i)));
        if (bad && numel > 100) {
          host.back().as<float>()[numel / 2] = i % 2 == 0 ? INFINITY : NAN;
        }
        memory.push_back(std::make_unique<DeviceBuffer>(host.back(), 4 * (i % 2)));
        device_spans.push_back({memory.back()->as<float>(), numel});
      }
      for (Buffer& buffer : host) {
        host_spans.push_back({buffer.as<float>(), buffer.bytes() / 4});
      }
      for (double p : {1.0, 2.0, 3.0}) {
        double expected[2] = {5.0, 1.0};
        Buffer start(16, 0);
        std::memcpy(start.as<char>(), expected, 16);
        DeviceBuffer result(start, 0);
        sum_of_abs_powers(host_spans, p, expected, Stream{});
        sum_of_abs_powers(device_spans, p, result.as<double>(), kCuda);
        Buffer got = result.to_host();
        ASSERT_EQ(got.as<double>()[1], expected[1]);
        if (!bad) {
          ASSERT_NEAR(got.as<double>()[0], expected[0], 1e-14 * expected[0]);
        }
      }
      int64_t expected = 0;
      Buffer start = scalar(int64_t{0});
      DeviceBuffer result(start, 0);
      max_abs_bits(host_spans, &expected, Stream{});
      max_abs_bits(device_spans, result.as<int64_t>(), kCuda);
      Buffer got = result.to_host();
      ASSERT_EQ(*got.as<int64_t>(), expected);
    }
  }
}

// The arrays of a segment on both sides, in the order master, first moment or
// momentum, second moment, its maximum, gradient, working.
struct Pair {
  Pair(int64_t numel, ScalarType working_dtype, int64_t offset) : numel(numel) {
    for (uint32_t array = 0; array < 6; ++array) {
      const ScalarType dtype = array == 5 ? working_dtype : ScalarType::Float;
      host.push_back(ordinary(numel, dtype, array));
      if (array == 2 || array == 3) {
        float* values = host.back().as<float>();
        std::transform(values, values + numel, values, [](float x) { return x * x; });
      }
      device.push_back(std::make_unique<DeviceBuffer>(host.back(), offset * size_of(dtype)));
    }
  }
  template <class Buffers>
  static AdamSegment adam(Buffers& buffers, int64_t numel, int64_t step) {
    const auto floats = [&](int i) {
      if constexpr (std::is_same_v<Buffers, std::vector<Buffer>>) {
        return buffers[i].template as<float>();
      } else {
        return buffers[i]->template as<float>();
      }
    };
    return {floats(0), floats(1), floats(2), floats(3), floats(4), floats(5), numel, step, nullptr};
  }
  template <class Buffers>
  static SgdSegment sgd(Buffers& buffers, int64_t numel, bool first_step) {
    const AdamSegment s = adam(buffers, numel, 1);
    return {s.master, s.exp_avg, s.gradient, s.working, numel, first_step, nullptr};
  }
  template <class Buffers>
  static LionSegment lion(Buffers& buffers, int64_t numel) {
    const AdamSegment s = adam(buffers, numel, 1);
    return {s.master, s.exp_avg, s.gradient, s.working, numel};
  }
  bool same_bytes() {
    for (size_t array = 0; array < host.size(); ++array) {
      if (!device[array]->to_host().same_bytes(host[array])) {
        return false;
      }
    }
    return true;
  }

  int64_t numel;
  std::vector<Buffer> host;
  std::vector<std::unique_ptr<DeviceBuffer>> device;
};

TEST_F(CudaKernels, AdamHasTheBitsOfTheCpu) {
  Buffer coefficient = scalar(0.37F);
  DeviceBuffer device_coefficient(coefficient, 0);
  Buffer none = scalar(0.0);
  DeviceBuffer device_none(none, 0);
  for (ScalarType dtype : kTypes) {
    for (int variant = 0; variant < 8; ++variant) {
      AdamOptions options{.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6};
      options.amsgrad = (variant & 1) != 0;
      options.decoupled = (variant & 2) != 0;
      options.weight_decay = (variant & 4) != 0 ? 0.1 : 0.0;
      std::vector<std::unique_ptr<Pair>> pairs;
      std::vector<AdamSegment> host;
      std::vector<AdamSegment> device;
      for (int64_t i = 0; i < 100; ++i) {
        const int64_t numel = i < 11 ? kCudaSizes[i] : i;
        pairs.push_back(std::make_unique<Pair>(numel, dtype, i % 2));
        host.push_back(Pair::adam(pairs.back()->host, numel, i + 1));
        device.push_back(Pair::adam(pairs.back()->device, numel, i + 1));
      }
      adam_step(host, options, coefficient.as<float>(), none.as<double>(), dtype, Stream{});
      adam_step(device, options, device_coefficient.as<float>(), device_none.as<double>(), dtype,
                kCuda);
      for (size_t i = 0; i < pairs.size(); ++i) {
        ASSERT_TRUE(pairs[i]->same_bytes())
            << c10::toString(dtype) << " variant " << variant << " segment " << i;
      }
    }
  }
}

TEST_F(CudaKernels, AdamReadsTheStepCountOnTheDevice) {
  Pair a(20000, ScalarType::BFloat16, 0);
  Pair b(20000, ScalarType::BFloat16, 0);
  Buffer steps[2] = {scalar(3.0F), scalar(500.0F)};
  DeviceBuffer device_steps[2] = {DeviceBuffer(steps[0], 0), DeviceBuffer(steps[1], 0)};
  const std::vector<AdamSegment> host = {Pair::adam(a.host, 20000, 3),
                                         Pair::adam(b.host, 20000, 500)};
  std::vector<AdamSegment> device = {Pair::adam(a.device, 20000, 0),
                                     Pair::adam(b.device, 20000, 0)};
  device[0].device_step = device_steps[0].as<float>();
  device[1].device_step = device_steps[1].as<float>();
  adam_step(host, {}, nullptr, nullptr, ScalarType::BFloat16, Stream{});
  adam_step(device, {}, nullptr, nullptr, ScalarType::BFloat16, kCuda);
  for (Pair* pair : {&a, &b}) {
    Buffer got = pair->device[0]->to_host();
    for (int64_t i = 0; i < 20000; ++i) {
      // An ulp in a scalar moves the update, about lr, by an ulp.
      ASSERT_NEAR(got.as<float>()[i], pair->host[0].as<float>()[i], 1e-6);
    }
  }
}

TEST_F(CudaKernels, SgdHasTheBitsOfTheCpu) {
  for (ScalarType dtype : kTypes) {
    for (int variant = 0; variant < 8; ++variant) {
      SgdOptions options{.lr = 0.1, .dampening = 0.0, .weight_decay = 0.01};
      options.momentum = (variant & 1) != 0 ? 0.9 : 0.0;
      options.nesterov = (variant & 2) != 0;
      for (int64_t numel : kCudaSizes) {
        Pair pair(numel, dtype, variant % 2);
        const bool first = (variant & 4) != 0;
        sgd_step(Pair::sgd(pair.host, numel, first), options, nullptr, nullptr, dtype, Stream{});
        sgd_step(Pair::sgd(pair.device, numel, first), options, nullptr, nullptr, dtype, kCuda);
        ASSERT_TRUE(pair.same_bytes())
            << c10::toString(dtype) << " variant " << variant << " numel " << numel;
      }
    }
  }
}

TEST_F(CudaKernels, SgdReadsOnTheDeviceWhichStepIsTheFirst) {
  for (const bool first : {true, false}) {
    Pair pair(20000, ScalarType::BFloat16, 0);
    Buffer count = scalar(first ? 1.0F : 2.0F);
    DeviceBuffer device_count(count, 0);
    SgdSegment device = Pair::sgd(pair.device, 20000, !first);
    device.device_step = device_count.as<float>();
    sgd_step(Pair::sgd(pair.host, 20000, first), {.momentum = 0.9}, nullptr, nullptr,
             ScalarType::BFloat16, Stream{});
    sgd_step(device, {.momentum = 0.9}, nullptr, nullptr, ScalarType::BFloat16, kCuda);
    ASSERT_TRUE(pair.same_bytes()) << first;
  }
}

TEST_F(CudaKernels, LionHasTheBitsOfTheCpu) {
  for (ScalarType dtype : kTypes) {
    for (int variant = 0; variant < 4; ++variant) {
      LionOptions options{.lr = 0.1};
      options.weight_decay = (variant & 1) != 0 ? 0.01 : 0.0;
      for (int64_t numel : kCudaSizes) {
        Pair pair(numel, dtype, variant / 2);
        lion_step(Pair::lion(pair.host, numel), options, nullptr, nullptr, dtype, Stream{});
        lion_step(Pair::lion(pair.device, numel), options, nullptr, nullptr, dtype, kCuda);
        ASSERT_TRUE(pair.same_bytes())
            << c10::toString(dtype) << " variant " << variant << " numel " << numel;
      }
    }
  }
}

TEST_F(CudaKernels, ANonFiniteCountLeavesEveryBitAsItWas) {
  Pair pair(1000, ScalarType::Half, 0);
  Buffer one = scalar(1.0);
  DeviceBuffer device_one(one, 0);
  adam_step(Pair::adam(pair.device, 1000, 1), {}, nullptr, device_one.as<double>(),
            ScalarType::Half, kCuda);
  sgd_step(Pair::sgd(pair.device, 1000, true), {.momentum = 0.9}, nullptr, device_one.as<double>(),
           ScalarType::Half, kCuda);
  lion_step(Pair::lion(pair.device, 1000), {}, nullptr, device_one.as<double>(), ScalarType::Half,
            kCuda);
  EXPECT_TRUE(pair.same_bytes());
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
