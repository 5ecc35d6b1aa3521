// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the arithmetic of one element of Adam, SGD, Lion and the moving average, written once
// for the CPU loops and for the CUDA kernels. The formulas are in adam.h, sgd.h, lion.h and ema.h.
//
// Products and sums are separate roundings: whoever includes this file compiles
// with -ffp-contract=off (g++, clang) or -fmad=false (nvcc), which costs nothing
// because these loops wait for memory.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ZERO_KERNELS_INLINE static __host__ __device__ __forceinline__
#else
#define ZERO_KERNELS_INLINE static inline __attribute__((always_inline))
#endif

namespace zero::kernels {

// The scalars of one Adam step, computed in double and rounded once.
struct AdamCoefficients {
  float decay;         // 1 - lr * weight_decay
  float weight_decay;  // for Adam; 0 leaves the gradient as it is
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float sqrt_bias_correction2;  // sqrt(1 - beta2^k)
  float negative_step_size;     // -lr / (1 - beta1^k)
  bool amsgrad;
  bool decoupled;
};

// The values that the two fields which depend on the step are computed from.
struct AdamPowers {
  double lr;
  double beta1;
  double beta2;
};

// Where `lr` is not null, the learning rate of a step is read there, in memory of the kernels.
struct DeviceRate {
  const double* lr;
  double weight_decay;
};

// The scalars of one SGD step.
struct SgdCoefficients {
  float negative_lr;
  float momentum;
  float one_minus_dampening;
  float weight_decay;
  bool nesterov;
};

// The scalars of one Lion step.
struct LionCoefficients {
  float decay;  // 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float negative_lr;
};

ZERO_KERNELS_INLINE float decay_of(double lr, double weight_decay) {
  return static_cast<float>(1.0 - lr * weight_decay);
}

ZERO_KERNELS_INLINE void set_rate(double lr, double weight_decay, LionCoefficients& c) {
  c.decay = decay_of(lr, weight_decay);
  c.negative_lr = static_cast<float>(-lr);
}

ZERO_KERNELS_INLINE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// The moments of the element whose parameter is `p`; `g` is the gradient times the clip
// coefficient. T is float here and below, or a vector of floats, one for each of several elements.
template <bool kDecoupled, class T>
ZERO_KERNELS_INLINE void adam_moments(const AdamCoefficients& c, T g, T p, T& m, T& v) {
  if (!kDecoupled && c.weight_decay != 0.0F) {
    g = g + c.weight_decay * p;
  }
  m = c.beta1 * m + c.one_minus_beta1 * g;
  v = c.beta2 * v + (c.one_minus_beta2 * g) * g;
}

// Written so that a NaN in v wins, as in torch::maximum.
template <class T>
ZERO_KERNELS_INLINE T larger_moment(T v, T max_v) {
  return v <= max_v ? max_v : v;
}

// The parameter, from its new first moment and the root of its new second one.
template <bool kDecoupled, class T>
ZERO_KERNELS_INLINE void adam_parameter(const AdamCoefficients& c, T m, T root, T& p) {
  if constexpr (kDecoupled) {
    p = p * c.decay;
  }
  const T denominator = root / c.sqrt_bias_correction2 + c.eps;
  p = p + (c.negative_step_size * m) / denominator;
}

// `max_v` is touched with kAmsgrad alone.
template <bool kAmsgrad, bool kDecoupled>
ZERO_KERNELS_INLINE void adam_element(const AdamCoefficients& c, float g, float& p, float& m,
                                      float& v, float& max_v) {
  adam_moments<kDecoupled>(c, g, p, m, v);
  if constexpr (kAmsgrad) {
    max_v = larger_moment(v, max_v);
  }
  adam_parameter<kDecoupled>(c, m, square_root(kAmsgrad ? max_v : v), p);
}

// `b` is touched with kMomentum alone, and not read on the first step.
template <bool kMomentum, bool kFirst>
ZERO_KERNELS_INLINE void sgd_element(const SgdCoefficients& c, float g, float& p, float& b) {
  if (c.weight_decay != 0.0F) {
    g = g + c.weight_decay * p;
  }
  if constexpr (kMomentum) {
    b = kFirst ? g : c.momentum * b + c.one_minus_dampening * g;
    g = c.nesterov ? g + c.momentum * b : b;
  }
  p = p + c.negative_lr * g;
}

ZERO_KERNELS_INLINE void lion_element(const LionCoefficients& c, float g, float& p, float& m) {
  const float direction = c.beta1 * m + c.one_minus_beta1 * g;
  // Both comparisons are false for NaN.
  const float sign = (direction > 0.0F ? 1.0F : 0.0F) - (direction < 0.0F ? 1.0F : 0.0F);
  p = p * c.decay;
  p = p + c.negative_lr * sign;
  m = c.beta2 * m + c.one_minus_beta2 * g;
}

ZERO_KERNELS_INLINE void ema_element(float weight, float value, float& average) {
  const float difference = value - average;
  average = average + weight * difference;
}

}  // namespace zero::kernels
