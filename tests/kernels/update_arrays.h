// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// For the tests of adam_step, sgd_step and lion_step: the arrays of a segment, and each update with
// its variants.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

#include "kernels/adam.h"
#include "kernels/lion.h"
#include "kernels/sgd.h"
#include "kernels/split_master.h"
#include "kernels/stored_state.h"
#include "tests/kernels/stored_reference.h"
#include "tests/kernels/test_buffers.h"

namespace zero::kernels {

inline constexpr StateType kStateTypes[] = {StateType::kFloat, StateType::kBFloat16,
                                            StateType::kInt8};

// Masters that rounding to bf16 is hard for: ties, the ends of the range, subnormal numbers, zeros.
inline constexpr uint32_t kHard[] = {
    0x3f808000U, 0x3f818000U, 0xbf808000U, 0x3f807fffU, 0xbf808001U, 0x00000001U, 0x80000001U,
    0x007fffffU, 0x80000000U, 0x00008000U, 0x7f7fffffU, 0xff7fffffU, 0x7f7f8000U, 0xff7f7fffU};

// The arrays of one segment; copies are independent. They begin `offset` elements, or with kInt8
// scales, off their alignment to a vector. A split master is in `working` and `remainder`.
struct Arrays {
  Arrays(StateType type, int64_t numel, c10::ScalarType working_dtype, int64_t offset,
         bool split = false)
      : type(type),
        numel(numel),
        split(split),
        master(4 * numel, 4 * offset),
        remainder(2 * numel, 2 * offset),
        first(state_bytes(type, numel), (type == StateType::kBFloat16 ? 2 : 4) * offset),
        second(state_bytes(type, numel), (type == StateType::kBFloat16 ? 2 : 4) * offset),
        largest(4 * numel, 4 * offset),
        gradient(4 * numel, 4 * offset),
        working(numel * size_of(working_dtype), offset * size_of(working_dtype)) {
    fill_ordinary(master.as<float>(), numel, 1);
    fill_ordinary(gradient.as<float>(), numel, 4, 1e-2F);
    std::vector<float> values(static_cast<size_t>(numel));
    fill_ordinary(values.data(), numel, 2, 1e-2F);
    for (int64_t i = 3; i < numel; i += 5) {
      if (split) master.as<float>()[i] = std::bit_cast<float>(kHard[i / 5 % std::size(kHard)]);
      // Where nothing moves, not even a hard master.
      if (i % 2 == 1) {
        gradient.as<float>()[i] = i % 4 == 1 ? 0.0F : -0.0F;
        values[i] = 0.0F;
      }
    }
    encode_state(type, false, values.data(), numel, first.as<void>());
    for (int64_t i = 0; i < numel; ++i) {
      values[i] *= values[i];
      largest.as<float>()[i] = values[i] * static_cast<float>(i % 3);
      if (i % 7 == 0) values[i] = 0.0F;
    }
    encode_state(type, true, values.data(), numel, second.as<void>());
    if (split) split_master();
  }

  void split_master() {
    split_halves(master.as<float>(), numel, working.as<void>(), remainder.as<int16_t>(), Stream{});
  }
  AdamSegment adam() {
    AdamSegment s;
    s.master = split ? nullptr : master.as<float>();
    s.exp_avg = first.as<void>();
    s.exp_avg_sq = second.as<void>();
    s.max_exp_avg_sq = largest.as<float>();
    s.gradient = gradient.as<float>();
    s.working = working.as<void>();
    s.numel = numel;
    s.step = step;
    s.state_type = type;
    s.parameter = parameter;
    s.element = element;
    s.remainder = split ? remainder.as<int16_t>() : nullptr;
    return s;
  }
  SgdSegment sgd() {
    const AdamSegment s = adam();
    return {s.master, s.exp_avg,    s.gradient,  s.working, s.numel,    false,
            nullptr,  s.state_type, s.parameter, s.element, s.remainder};
  }
  LionSegment lion() {
    const AdamSegment s = adam();
    return {s.master,     s.exp_avg,   s.gradient, s.working,  s.numel,
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

  StateType type;
  int64_t numel;
  bool split;
  int64_t step = 7;
  int64_t parameter = 3;
  int64_t element = 512;
  Buffer master, remainder, first, second, largest, gradient, working;
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
  static constexpr auto* step = &adam_step;
  static constexpr auto* expect = &reference::stored_adam_step;
};

struct Sgd {
  static constexpr int kVariants = 16;
  static SgdOptions options(int variant, int64_t step) {
    SgdOptions o{.lr = 0.1, .momentum = (variant & 8) != 0 ? 0.0 : 0.9};
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
  static constexpr auto* step = &sgd_step;
  static constexpr auto* expect = &reference::stored_sgd_step;
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
  static constexpr auto* step = &lion_step;
  static constexpr auto* expect = &reference::stored_lion_step;
};

using Rules = ::testing::Types<Adam, Sgd, Lion>;

}  // namespace zero::kernels
