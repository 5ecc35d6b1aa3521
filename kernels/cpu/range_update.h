// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of adam.h, sgd.h, lion.h and ema.h. Included once by
// range_kernels_impl.h, for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/range_conversions.h"
#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_types.h"

namespace zero::kernels {
namespace {

// Without a working parameter nothing is written beside the master.
struct NoWorking {};

inline void store_one(float value, float& destination) { destination = value; }
inline void store_one(float value, BFloat16& destination) {
  destination = narrow_one_bfloat16(value);
}
inline void store_one(float value, Half& destination) { destination = narrow_one_half(value); }

// The cast is made in the loop of the update, for fp16 too, where F16C cannot be
// used then: a second loop over chunks, though in the cache, is 15 % slower.
// kRoots: `v` receives the roots of the new second moments.
template <bool kAmsgrad, bool kDecoupled, bool kRoots, class W>
void adam_loop(const AdamCoefficients c, float gradient_coefficient, int64_t numel,
               float* __restrict p, float* __restrict m, float* __restrict v,
               float* __restrict max_v, const float* __restrict gradient, W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    // Copies, so that the compiler sees every store through its own __restrict pointer.
    float p_i = p[i];
    float m_i = m[i];
    float v_i = v[i];
    float max_v_i = kAmsgrad ? max_v[i] : 0.0F;
    adam_element<kAmsgrad, kDecoupled>(c, gradient[i] * gradient_coefficient, p_i, m_i, v_i,
                                       max_v_i);
    p[i] = p_i;
    m[i] = m_i;
    v[i] = kRoots ? square_root(v_i) : v_i;
    if constexpr (kAmsgrad) {
      max_v[i] = max_v_i;
    }
    if constexpr (!__is_same(W, NoWorking)) {
      store_one(p_i, working[i]);
    }
  }
}

template <bool kRoots, class W>
inline auto adam_loop_of(const AdamCoefficients& c) {
  return c.amsgrad
             ? (c.decoupled ? adam_loop<true, true, kRoots, W> : adam_loop<true, false, kRoots, W>)
             : (c.decoupled ? adam_loop<false, true, kRoots, W>
                            : adam_loop<false, false, kRoots, W>);
}

void adam_range(const AdamSegment& range, const AdamCoefficients& c, float gradient_coefficient,
                ElementType working_type) {
  const auto run = [&]<class W>(W*) {
    const auto loop = adam_loop_of<false, W>(c);
    loop(c, gradient_coefficient, range.numel, range.master, static_cast<float*>(range.exp_avg),
         static_cast<float*>(range.exp_avg_sq), range.max_exp_avg_sq, range.gradient,
         static_cast<W*>(range.working));
  };
  range.working == nullptr ? run(static_cast<NoWorking*>(nullptr)) : with_type(working_type, run);
}

template <bool kMomentum, bool kFirst, class W>
void sgd_loop(const SgdCoefficients c, float gradient_coefficient, int64_t numel,
              float* __restrict p, float* __restrict b, const float* __restrict gradient,
              W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    float p_i = p[i];
    float b_i = kMomentum && !kFirst ? b[i] : 0.0F;
    sgd_element<kMomentum, kFirst>(c, gradient[i] * gradient_coefficient, p_i, b_i);
    p[i] = p_i;
    if constexpr (kMomentum) {
      b[i] = b_i;
    }
    if constexpr (!__is_same(W, NoWorking)) {
      store_one(p_i, working[i]);
    }
  }
}

template <class W>
inline auto sgd_loop_of(const SgdCoefficients& c, bool first_step) {
  return c.momentum == 0.0F ? sgd_loop<false, false, W>
         : first_step       ? sgd_loop<true, true, W>
                            : sgd_loop<true, false, W>;
}

void sgd_range(const SgdSegment& range, const SgdCoefficients& c, float gradient_coefficient,
               ElementType working_type) {
  const auto run = [&]<class W>(W*) {
    const auto loop = sgd_loop_of<W>(c, range.first_step);
    loop(c, gradient_coefficient, range.numel, range.master, static_cast<float*>(range.momentum),
         range.gradient, static_cast<W*>(range.working));
  };
  range.working == nullptr ? run(static_cast<NoWorking*>(nullptr)) : with_type(working_type, run);
}

template <class W>
void lion_loop(const LionCoefficients c, float gradient_coefficient, int64_t numel,
               float* __restrict p, float* __restrict m, const float* __restrict gradient,
               W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    float p_i = p[i];
    float m_i = m[i];
    lion_element(c, gradient[i] * gradient_coefficient, p_i, m_i);
    p[i] = p_i;
    m[i] = m_i;
    if constexpr (!__is_same(W, NoWorking)) {
      store_one(p_i, working[i]);
    }
  }
}

void lion_range(const LionSegment& range, const LionCoefficients& c, float gradient_coefficient,
                ElementType working_type) {
  const auto run = [&]<class W>(W*) {
    lion_loop<W>(c, gradient_coefficient, range.numel, range.master,
                 static_cast<float*>(range.exp_avg), range.gradient,
                 static_cast<W*>(range.working));
  };
  range.working == nullptr ? run(static_cast<NoWorking*>(nullptr)) : with_type(working_type, run);
}

void ema_loop(float weight, int64_t numel, float* __restrict average,
              const float* __restrict values) {
  for (int64_t i = 0; i < numel; ++i) {
    float average_i = average[i];
    ema_element(weight, values[i], average_i);
    average[i] = average_i;
  }
}

void ema_range(const EmaSegment& range, float weight) {
  ema_loop(weight, range.numel, range.average, range.values);
}

}  // namespace
}  // namespace zero::kernels
