// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the CPU loops of adam.h, sgd.h, lion.h and ema.h. Included once by
// range_kernels_impl.h, for each instruction set.
//
// P and W are as in range_masters.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/range_kernels.h"
#include "kernels/cpu/range_lanes.h"
#include "kernels/cpu/range_masters.h"
#include "kernels/cpu/range_types.h"
#include "kernels/detail/update_rules.h"

namespace zero::kernels {
namespace {

// Calls f(p, working) with the pointers to the master and to the working values of a segment, in
// their types; where nothing is written beside the master, `working` is a null NoWorking*.
template <class Segment, class F>
inline void with_master(const Segment& s, ElementType working_type, const F& f) {
  if (s.remainder != nullptr) {
    f(s.remainder, static_cast<BFloat16*>(s.working));
  } else if (s.working == nullptr) {
    f(s.master, static_cast<NoWorking*>(nullptr));
  } else {
    with_type(working_type, [&]<class W>(W*) { f(s.master, static_cast<W*>(s.working)); });
  }
}

#ifdef ZERO_LANES
// The first elements of adam_loop(), two vectors at a time; returns their number. The compiler
// takes more instructions for the halves of masters than for the update.
template <bool kAmsgrad, bool kDecoupled>
inline int64_t adam_lanes(const AdamCoefficients& c, float gradient_coefficient, int64_t numel,
                          int16_t* __restrict p, float* __restrict m, float* __restrict v,
                          float* __restrict max_v, const float* __restrict gradient,
                          BFloat16* __restrict working) {
  int64_t i = 0;
  for (; i + 2 * kVectorLanes <= numel; i += 2 * kVectorLanes) {
    Floats values[2];
    for (int64_t k = 0; k < 2; ++k) {
      const int64_t at = i + kVectorLanes * k;
      Floats p_i = load_masters(p + at, working + at);
      Floats m_i = load_lanes<Floats>(m + at);
      Floats v_i = load_lanes<Floats>(v + at);
      adam_moments<kDecoupled>(c, load_lanes<Floats>(gradient + at) * gradient_coefficient, p_i,
                               m_i, v_i);
      store_lanes(m_i, m + at);
      store_lanes(v_i, v + at);
      if constexpr (kAmsgrad) {
        v_i = larger_moment(v_i, load_lanes<Floats>(max_v + at));
        store_lanes(v_i, max_v + at);
      }
      adam_parameter<kDecoupled>(c, m_i, roots_of(v_i), p_i);
      values[k] = p_i;
    }
    store_masters(values[0], values[1], p + i, working + i);
  }
  return i;
}
#endif

// The cast is made in the loop of the update, for fp16 too, where F16C cannot be
// used then: a second loop over chunks, though in the cache, is 15 % slower.
template <bool kAmsgrad, bool kDecoupled, class P, class W>
void adam_loop(const AdamCoefficients c, float gradient_coefficient, int64_t numel, P* __restrict p,
               float* __restrict m, float* __restrict v, float* __restrict max_v,
               const float* __restrict gradient, W* __restrict working) {
  int64_t i = 0;
#ifdef ZERO_LANES
  if constexpr (__is_same(P, int16_t)) {
    i = adam_lanes<kAmsgrad, kDecoupled>(c, gradient_coefficient, numel, p, m, v, max_v, gradient,
                                         working);
  }
#endif
  for (; i < numel; ++i) {
    // Copies, so that the compiler sees every store through its own __restrict pointer.
    float p_i = load_master(p, working, i);
    float m_i = m[i];
    float v_i = v[i];
    float max_v_i = kAmsgrad ? max_v[i] : 0.0F;
    adam_element<kAmsgrad, kDecoupled>(c, gradient[i] * gradient_coefficient, p_i, m_i, v_i,
                                       max_v_i);
    store_master(p_i, p, working, i);
    m[i] = m_i;
    v[i] = v_i;
    if constexpr (kAmsgrad) {
      max_v[i] = max_v_i;
    }
  }
}

template <class P, class W>
inline auto adam_loop_of(const AdamCoefficients& c) {
  return c.amsgrad ? (c.decoupled ? adam_loop<true, true, P, W> : adam_loop<true, false, P, W>)
                   : (c.decoupled ? adam_loop<false, true, P, W> : adam_loop<false, false, P, W>);
}

void adam_range(const AdamSegment& range, const AdamCoefficients& c, float gradient_coefficient,
                ElementType working_type) {
  with_master(range, working_type, [&]<class P, class W>(P* p, W* working) {
    const auto loop = adam_loop_of<P, W>(c);
    loop(c, gradient_coefficient, range.numel, p, static_cast<float*>(range.exp_avg),
         static_cast<float*>(range.exp_avg_sq), range.max_exp_avg_sq, range.gradient, working);
  });
}

template <bool kMomentum, bool kFirst, class P, class W>
void sgd_loop(const SgdCoefficients c, float gradient_coefficient, int64_t numel, P* __restrict p,
              float* __restrict b, const float* __restrict gradient, W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    float p_i = load_master(p, working, i);
    float b_i = kMomentum && !kFirst ? b[i] : 0.0F;
    sgd_element<kMomentum, kFirst>(c, gradient[i] * gradient_coefficient, p_i, b_i);
    store_master(p_i, p, working, i);
    if constexpr (kMomentum) {
      b[i] = b_i;
    }
  }
}

template <class P, class W>
inline auto sgd_loop_of(const SgdCoefficients& c, bool first_step) {
  return c.momentum == 0.0F ? sgd_loop<false, false, P, W>
         : first_step       ? sgd_loop<true, true, P, W>
                            : sgd_loop<true, false, P, W>;
}

void sgd_range(const SgdSegment& range, const SgdCoefficients& c, float gradient_coefficient,
               ElementType working_type) {
  with_master(range, working_type, [&]<class P, class W>(P* p, W* working) {
    const auto loop = sgd_loop_of<P, W>(c, range.first_step);
    loop(c, gradient_coefficient, range.numel, p, static_cast<float*>(range.momentum),
         range.gradient, working);
  });
}

template <class P, class W>
void lion_loop(const LionCoefficients c, float gradient_coefficient, int64_t numel, P* __restrict p,
               float* __restrict m, const float* __restrict gradient, W* __restrict working) {
  for (int64_t i = 0; i < numel; ++i) {
    float p_i = load_master(p, working, i);
    float m_i = m[i];
    lion_element(c, gradient[i] * gradient_coefficient, p_i, m_i);
    store_master(p_i, p, working, i);
    m[i] = m_i;
  }
}

void lion_range(const LionSegment& range, const LionCoefficients& c, float gradient_coefficient,
                ElementType working_type) {
  with_master(range, working_type, [&]<class P, class W>(P* p, W* working) {
    lion_loop<P, W>(c, gradient_coefficient, range.numel, p, static_cast<float*>(range.exp_avg),
                    range.gradient, working);
  });
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
