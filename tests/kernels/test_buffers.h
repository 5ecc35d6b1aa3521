// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// For the tests of this folder: buffers that notice writes past their ends, inputs
// that reach every branch of a conversion, and the settings under which every
// kernel has to give the same result.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_capability.h"

namespace zero::kernels {

// Around the widths of vectors, of unrolled loops, of chunks and of blocks.
inline const std::vector<int64_t> kSizes = {0,    1,    7,    8,     15,    16,   17,  31,
                                            33,   63,   64,   65,    127,   255,  256, 257,
                                            1000, 1023, 1025, 16384, 16385, 50003};

// Calls f() with every instruction set of this processor, on 1, 2 and 3 threads.
// Restores the settings.
template <class F>
void for_each_setting(const F& f) {
  const int threads_before = at::get_num_threads();
  const std::string name_before = range_kernels().name;
  for (CpuCapability capability : kCpuCapabilities) {
    if (range_kernels_for(capability) == nullptr) {
      continue;
    }
    set_cpu_capability(capability);
    for (int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      SCOPED_TRACE(std::string(range_kernels().name) + ", threads " + std::to_string(threads));
      f();
    }
  }
  for (CpuCapability capability : kCpuCapabilities) {
    if (name_before == name_of(capability)) set_cpu_capability(capability);
  }
  at::set_num_threads(threads_before);
}

// `bytes` bytes that start `offset` bytes after a 64-byte boundary, between guards.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t offset) : bytes_(bytes), offset_(kGuard + offset) {
    memory_.resize((offset_ + bytes_ + kGuard + 63) / 64);
    std::memset(memory_.data(), kPattern, memory_.size() * 64);
  }

  template <class T>
  T* as() {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory_.data()) + offset_);
  }
  int64_t bytes() const { return bytes_; }

  bool guards_intact() const {
    const auto* all = reinterpret_cast<const unsigned char*>(memory_.data());
    for (int64_t i = 0; i < static_cast<int64_t>(memory_.size()) * 64; ++i) {
      if ((i < offset_ || i >= offset_ + bytes_) && all[i] != kPattern) {
        return false;
      }
    }
    return true;
  }

  bool same_bytes(const Buffer& other) const {
    return bytes_ == other.bytes_ &&
           std::memcmp(reinterpret_cast<const char*>(memory_.data()) + offset_,
                       reinterpret_cast<const char*>(other.memory_.data()) + other.offset_,
                       static_cast<size_t>(bytes_)) == 0;
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  static constexpr int64_t kGuard = 64;
  static constexpr unsigned char kPattern = 0xa5;
  int64_t bytes_;
  int64_t offset_;
  std::vector<Line> memory_;
};

inline int64_t size_of(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// Values of ordinary size, as gradients and parameters have.
inline void fill_ordinary(float* values, int64_t numel, uint32_t seed, float scale = 1.0F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = normal(generator);
  }
}

// Every kind of float: all exponents, ties, subnormals, zeros, infinities, NaN.
inline void fill_any_bits(float* values, int64_t numel, uint32_t seed) {
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < numel; ++i) {
    uint32_t bits = generator();
    if (i % 4 == 1) {
      bits &= 0xfffff000U;  // often halfway between two 16-bit numbers
    } else if (i % 4 == 2) {
      bits = (bits & 0x80ffffffU) | 0x33000000U;  // around the subnormal fp16 numbers
    } else if (i % 4 == 3) {
      bits = (bits & 0x8fffffffU) | 0x40000000U;  // around the largest fp16 number
    }
    values[i] = std::bit_cast<float>(bits);
  }
}

// How many representable numbers apart two floats are; 0 when both are NaN.
inline int64_t ulp_distance(float a, float b) {
  if (std::isnan(a) && std::isnan(b)) {
    return 0;
  }
  const auto ordered = [](float x) -> int64_t {
    const auto bits = std::bit_cast<int32_t>(x);
    return bits < 0 ? -static_cast<int64_t>(bits & 0x7fffffff) : bits;
  };
  return std::abs(ordered(a) - ordered(b));
}

}  // namespace zero::kernels
