// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// For the tests of CUDA kernels: device memory that notices accesses past its ends, and inputs.
// The tests run on a GPU, and on the CPU with the emulation of tests/support/cuda_emulation.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sanitizer/asan_interface.h>

#include <cstring>
#include <vector>

#include "kernels/cast.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/stream.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {

inline const Stream kCuda{true, nullptr};
inline const std::vector<c10::ScalarType> kTypes = {
    c10::ScalarType::Float, c10::ScalarType::BFloat16, c10::ScalarType::Half};
// Around the widths of packs and the sizes of blocks and tiles.
inline const std::vector<int64_t> kCudaSizes = {0,   1,   3,    7,    8,    9,   255,
                                                256, 257, 1023, 1024, 1025, 8193};

// While it exists a launch has at most so many blocks. With 3, blocks take several tiles.
class BlockLimit {
 public:
  explicit BlockLimit(int64_t blocks)
      : before_(cuda::block_limit.exchange(blocks)), trace_(__FILE__, __LINE__, blocks) {}
  BlockLimit(const BlockLimit&) = delete;
  BlockLimit& operator=(const BlockLimit&) = delete;
  ~BlockLimit() { cuda::block_limit = before_; }

 private:
  int64_t before_;
  ::testing::ScopedTrace trace_;
};
inline const std::vector<int64_t> kBlockLimits = {3, int64_t{1} << 30};

// Skips, with the reason, where there is no GPU.
class OnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(error);
    }
  }
};

// A copy of a host buffer in device memory that begins `offset` bytes after an aligned address.
// What is around it must stay as it is.
class DeviceBuffer {
 public:
  DeviceBuffer(Buffer& host, int64_t offset)
      : bytes_(host.bytes()), begin_(kGuard + offset), all_(begin_ + bytes_ + kGuard) {
    EXPECT_EQ(cudaMalloc(&memory_, static_cast<size_t>(all_)), cudaSuccess);
    std::vector<char> filled(static_cast<size_t>(all_), kPattern);
    std::memcpy(filled.data() + begin_, host.as<void>(), static_cast<size_t>(bytes_));
    EXPECT_EQ(cudaMemcpy(memory_, filled.data(), filled.size(), cudaMemcpyDefault), cudaSuccess);
    poison(true);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    to_host();
    cudaFree(memory_);
  }

  template <class T>
  T* as() {
    return static_cast<T*>(static_cast<void*>(static_cast<char*>(memory_) + begin_));
  }
  Buffer to_host() {
    Buffer host(bytes_, 0);
    std::vector<char> copied(static_cast<size_t>(all_));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    poison(false);
    EXPECT_EQ(cudaMemcpy(copied.data(), memory_, copied.size(), cudaMemcpyDefault), cudaSuccess);
    poison(true);
    for (int64_t i = 0; i < all_; ++i) {
      if ((i < begin_ || i >= begin_ + bytes_) && copied[static_cast<size_t>(i)] != kPattern) {
        ADD_FAILURE() << "a write to byte " << i - begin_ << " of " << bytes_;
        break;
      }
    }
    std::memcpy(host.as<void>(), copied.data() + begin_, static_cast<size_t>(bytes_));
    return host;
  }

 private:
  // AddressSanitizer then sees reads too, which nothing else would notice.
  void poison([[maybe_unused]] bool poisoned) {
#ifdef __SANITIZE_ADDRESS__
    const auto set = poisoned ? __asan_poison_memory_region : __asan_unpoison_memory_region;
    set(memory_, static_cast<size_t>(begin_));
    set(static_cast<char*>(memory_) + begin_ + bytes_, static_cast<size_t>(kGuard));
#endif
  }

  static constexpr int64_t kGuard = 256;
  static constexpr char kPattern = 0x5a;
  void* memory_ = nullptr;
  int64_t bytes_;
  int64_t begin_;
  int64_t all_;
};

// Values of ordinary size; another `seed` gives others.
inline Buffer ordinary(int64_t numel, c10::ScalarType dtype, uint32_t seed) {
  constexpr int64_t kPool = 65521;
  static const std::vector<float> pool = [] {
    std::vector<float> values(kPool);
    fill_ordinary(values.data(), kPool, 1);
    return values;
  }();
  Buffer wide(4 * numel, 0);
  for (int64_t i = 0; i < numel; ++i) {
    wide.as<float>()[i] = pool[static_cast<size_t>((i + int64_t{seed} * 7919) % kPool)];
  }
  Buffer buffer(numel * size_of(dtype), 0);
  cast_copy(wide.as<void>(), c10::ScalarType::Float, buffer.as<void>(), dtype, numel, nullptr,
            Stream{});
  return buffer;
}

template <class T>
Buffer scalar(T value) {
  Buffer buffer(sizeof(T), 0);
  *buffer.as<T>() = value;
  return buffer;
}

}  // namespace zero::kernels
