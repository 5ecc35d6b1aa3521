// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Lion over flat fp32 segments, in one pass over memory.
//
// For each element, every operation rounded to fp32 and none fused:
//
//   g  = gradient * coefficient
//   p  = (1 - lr * weight_decay) * p
//   p  = p + (-lr) * sign(beta1 * m + (1 - beta1) * g)       sign(0) and sign(NaN) are 0
//   m  = beta2 * m + (1 - beta2) * g
//
// Source: X. Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm
// 2, with the decoupled weight decay applied first, as in the authors' code.
//
// The bits are the same for every instruction set and thread count, for every
// way of cutting an array into segments, and on CUDA.
//
// State that a segment stores in bf16 or in 8 bits is decoded before these lines and encoded behind
// them, as stored_state.h says. All of the above holds for it too; segments are
// then cut at multiples of kStateBlock.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// The numbers of Lion, alike for all segments.
struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  // [1], memory of the stream's kind; where not null, the learning rate is read from here instead.
  const double* device_lr = nullptr;
  // The number of the step, for the noise that rounds state of another type than kFloat: no two
  // steps should share one.
  int64_t noise_step = 0;
  // [1], a whole number, memory of the stream's kind; where not null, it is read here instead.
  const double* device_noise_step = nullptr;
};

// Updates every segment; the arguments are those of adam_step(). Throws c10::Error for another
// working_dtype, or a segment that segments.h refuses.
void lion_step(c10::ArrayRef<LionSegment> segments, const LionOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype, Stream stream);

}  // namespace zero::kernels
