// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic is float without fused operations (compile with -ffp-contract=off).
#include "tests/kernels/stored_reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/kernels/reference.h"

namespace zero::kernels::reference {
namespace {

uint64_t splitmix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9U;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebU;
  x ^= x >> 31;
  return x;
}

int64_t blocks_of(int64_t numel) { return (numel + 255) / 256; }

// The number of codes without sign, less one.
int top_of(bool root) { return root ? 255 : 127; }

void store_block(bool root, const float* values, int64_t count, const uint32_t* noise, float* scale,
                 uint8_t* codes) {
  const auto squares = static_cast<float>(top_of(root) * top_of(root));
  std::vector<float> sizes(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const float size = std::fabs(values[i]);
    sizes[i] = root ? std::sqrt(std::min(size, std::numeric_limits<float>::max())) : size;
    if (std::isnan(size)) sizes[i] = size;
  }
  float largest = 0.0F;
  for (const float size : sizes) largest = size > largest || std::isnan(size) ? size : largest;
  const bool finite =
      std::all_of(sizes.begin(), sizes.end(), [](float x) { return std::isfinite(x); });
  *scale = !finite                            ? std::bit_cast<float>(0x7fc00000U)
           : largest < std::ldexp(1.0F, -100) ? 0.0F
                                              : largest;
  const float inverse =
      std::nextafter(std::nextafter(squares, 1e9F), 1e9F) / (*scale > 0.0F ? *scale : 1.0F);
  for (int64_t i = 0; i < count; ++i) {
    if (!(*scale > 0.0F)) {
      codes[i] = 0;
      continue;
    }
    const float t = sizes[i] * inverse;
    int q = 0;
    while (q + 1 < top_of(root) && static_cast<float>((q + 1) * (q + 1)) <= t) ++q;
    const uint32_t bits = root ? noise[i] / 65536U : noise[i] % 65536U;
    const float u = static_cast<float>(bits) / 65536.0F;
    if (t - static_cast<float>(q * q) > u * static_cast<float>(2 * q + 1)) ++q;
    if (root && q == 0 && sizes[i] > 0.0F) q = 1;
    codes[i] = static_cast<uint8_t>(!root && std::signbit(values[i]) ? -q : q);
  }
}

uint16_t rounded_bfloat16(float value, uint32_t noise) {
  auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits | 0x400000U) / 65536U);
  if (!std::isinf(value)) bits += noise;
  return static_cast<uint16_t>(bits / 65536U);
}

// A state array as fp32, and back.
class Decoded {
 public:
  Decoded(StateType type, bool root, void* stored, int64_t numel)
      : type_(type), root_(root), stored_(stored), values_(static_cast<size_t>(numel)) {
    for (int64_t i = 0; i < numel; ++i) values_[i] = stored_value(type, root, stored, numel, i);
  }
  float* values() { return values_.data(); }
  void store(int64_t step, int64_t parameter, int64_t element) {
    std::vector<uint32_t> noise(values_.size());
    for (size_t i = 0; i < noise.size(); ++i) {
      noise[i] = state_noise(step, parameter, element + static_cast<int64_t>(i));
    }
    store_values(type_, root_, values_.data(), static_cast<int64_t>(values_.size()), noise.data(),
                 stored_);
  }

 private:
  StateType type_;
  bool root_;
  void* stored_;
  std::vector<float> values_;
};

template <class Options>
int64_t step_of(const Options& options) {
  return options.device_noise_step != nullptr ? static_cast<int64_t>(*options.device_noise_step)
                                              : options.noise_step;
}

}  // namespace

uint32_t state_noise(int64_t step, int64_t parameter, int64_t element) {
  uint64_t seed = splitmix(static_cast<uint64_t>(step / 16) + 0x9e3779b97f4a7c15U);
  seed = splitmix(seed + static_cast<uint64_t>(parameter));
  const uint64_t block = splitmix(seed + static_cast<uint64_t>(element / 256));
  const auto multiple = static_cast<uint64_t>(element % 256 + step % 16);
  return static_cast<uint32_t>((block >> 32) + multiple * 0x9e379e37U);
}

float stored_value(StateType type, bool root, const void* stored, int64_t numel, int64_t i) {
  if (type == StateType::kBFloat16) {
    return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(stored)[i]} << 16);
  }
  float scale = 0.0F;
  std::memcpy(&scale, static_cast<const char*>(stored) + 4 * (i / 256), sizeof(scale));
  const uint8_t code = static_cast<const uint8_t*>(stored)[4 * blocks_of(numel) + i];
  const int q = root ? code : std::abs(static_cast<int>(static_cast<int8_t>(code)));
  const float unit = 1.0F / static_cast<float>(top_of(root) * top_of(root));
  const float size = (static_cast<float>(q * q) * unit) * scale;
  if (root) return size * size;
  return static_cast<int8_t>(code) < 0 ? -size : size;
}

void store_values(StateType type, bool root, const float* values, int64_t numel,
                  const uint32_t* noise, void* stored) {
  if (type == StateType::kBFloat16) {
    for (int64_t i = 0; i < numel; ++i) {
      static_cast<uint16_t*>(stored)[i] =
          rounded_bfloat16(values[i], root ? noise[i] / 65536U : noise[i] % 65536U);
    }
    return;
  }
  for (int64_t begin = 0; begin < numel; begin += 256) {
    float scale = 0.0F;
    store_block(root, values + begin, std::min<int64_t>(256, numel - begin), noise + begin, &scale,
                static_cast<uint8_t*>(stored) + 4 * blocks_of(numel) + begin);
    std::memcpy(static_cast<char*>(stored) + 4 * (begin / 256), &scale, sizeof(scale));
  }
}

void stored_adam_step(const AdamSegment& segment, const AdamOptions& options,
                      const float* gradient_coefficient, c10::ScalarType working_dtype) {
  if (segment.state_type == StateType::kFloat) {
    return adam_step(segment, options, gradient_coefficient, nullptr, working_dtype);
  }
  Decoded first(segment.state_type, false, segment.exp_avg, segment.numel);
  Decoded second(segment.state_type, true, segment.exp_avg_sq, segment.numel);
  AdamSegment plain = segment;
  plain.exp_avg = first.values();
  plain.exp_avg_sq = second.values();
  adam_step(plain, options, gradient_coefficient, nullptr, working_dtype);
  first.store(step_of(options), segment.parameter, segment.element);
  second.store(step_of(options), segment.parameter, segment.element);
}

void stored_sgd_step(const SgdSegment& segment, const SgdOptions& options,
                     const float* gradient_coefficient, c10::ScalarType working_dtype) {
  if (segment.state_type == StateType::kFloat) {
    return sgd_step(segment, options, gradient_coefficient, nullptr, working_dtype);
  }
  Decoded first(segment.state_type, false, segment.momentum, segment.numel);
  SgdSegment plain = segment;
  plain.momentum = first.values();
  sgd_step(plain, options, gradient_coefficient, nullptr, working_dtype);
  if (options.momentum != 0.0) first.store(step_of(options), segment.parameter, segment.element);
}

void stored_lion_step(const LionSegment& segment, const LionOptions& options,
                      const float* gradient_coefficient, c10::ScalarType working_dtype) {
  if (segment.state_type == StateType::kFloat) {
    return lion_step(segment, options, gradient_coefficient, nullptr, working_dtype);
  }
  Decoded first(segment.state_type, false, segment.exp_avg, segment.numel);
  LionSegment plain = segment;
  plain.exp_avg = first.values();
  lion_step(plain, options, gradient_coefficient, nullptr, working_dtype);
  first.store(step_of(options), segment.parameter, segment.element);
}

}  // namespace zero::kernels::reference
