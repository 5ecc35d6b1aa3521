// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Adam and AdamW over flat fp32 segments, in one pass over memory: clip
// coefficient, weight decay, moments, update, and the cast of the new value into
// the working parameter.
//
// For each element, with k = step, every operation rounded to fp32 and none fused:
//
//   g  = gradient * coefficient
//   decoupled:   p = p * (1 - lr * weight_decay)       otherwise:  g = g + weight_decay * p
//   m  = beta1 * m + (1 - beta1) * g
//   v  = beta2 * v + ((1 - beta2) * g) * g
//   u  = v, or with amsgrad  max_v = max(max_v, v),  u = max_v
//   p  = p + (-(lr / (1 - beta1^k)) * m) / (sqrt(u) / sqrt(1 - beta2^k) + eps)
//
// where the expressions of scalars alone are computed in double and rounded once.
// Source: D. P. Kingma and J. Ba, arXiv:1412.6980, algorithm 1 (eps outside the
// square root); I. Loshchilov and F. Hutter, arXiv:1711.05101, for the decoupled
// decay; S. Reddi et al., ICLR 2018, for amsgrad. The order of operations is that
// of torch::optim::Adam and AdamW, which differ from this in the last bits where
// their vector code fuses a product and a sum.
//
// The bits are the same for every instruction set and thread count, and for
// every way of cutting an array into segments. On CUDA they are the same as on
// the CPU, unless device_step is used: the device's pow() may then move the two
// powers of beta by an ulp of double.
//
// State that a segment stores in bf16 or in 8 bits is decoded before these lines and encoded behind
// them, as stored_state.h says; max_v is always fp32. All of the above holds for it too; segments
// are then cut at multiples of kStateBlock.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// The numbers of Adam and AdamW, alike for all segments.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool amsgrad = false;
  bool decoupled = true;  // true: AdamW;  false: Adam
  // [1], memory of the stream's kind; where not null, the learning rate is read from here instead.
  // Every segment then needs its device_step.
  const double* device_lr = nullptr;
  // The number of the step, for the noise that rounds state of another type than kFloat: no two
  // steps should share one.
  int64_t noise_step = 0;
  // [1], a whole number, memory of the stream's kind; where not null, it is read here instead.
  const double* device_noise_step = nullptr;
};

// Updates every segment: one parallel region on the CPU, one launch for each
// few dozen segments on CUDA.
//   gradient_coefficient  [1] fp32, null for 1: the clip coefficient
//   nonfinite             [1] double, may be null: where it is not 0, nothing at
//                         all is written (the step is skipped)
//   working_dtype         Float, BFloat16 or Half
// Both pointers are host memory for the CPU and device memory for CUDA; on CUDA
// they are read when the kernel runs, so the host need not know their values.
// Throws c10::Error for another working_dtype, amsgrad without max_exp_avg_sq, step < 1
// where device_step is null, device_lr without device_step, or a segment that segments.h refuses.
void adam_step(c10::ArrayRef<AdamSegment> segments, const AdamOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype, Stream stream);

}  // namespace zero::kernels
