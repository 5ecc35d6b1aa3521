// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// SGD with optional momentum over flat fp32 segments, in one pass over memory.
//
// For each element, every operation rounded to fp32 and none fused:
//
//   g  = gradient * coefficient
//   weight_decay != 0:   g = g + weight_decay * p
//   momentum != 0:       b = g on the first step, else  b = momentum * b + (1 - dampening) * g
//                        nesterov: d = g + momentum * b, else d = b
//   momentum == 0:       d = g
//   p  = p + (-lr) * d
//
// Source: I. Sutskever et al., ICML 2013, in the form that torch::optim::SGD
// gives it: the learning rate multiplies the velocity, and the first velocity is
// the gradient itself, without dampening. torch differs in the last bits where
// its vector code fuses a product and a sum.
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

#include <cstdint>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// The numbers of SGD, alike for all segments.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  // [1], memory of the stream's kind; where not null, the learning rate is read from here instead.
  const double* device_lr = nullptr;
  // The number of the step, for the noise that rounds state of another type than kFloat: no two
  // steps should share one.
  int64_t noise_step = 0;
  // [1], a whole number, memory of the stream's kind; where not null, it is read here instead.
  const double* device_noise_step = nullptr;
};

// Updates every segment; the arguments are those of adam_step(). Where
// *nonfinite is not 0 nothing is written: the next step is then still the first one.
// Throws c10::Error for another working_dtype, momentum without its array, or a segment that
// segments.h refuses.
void sgd_step(c10::ArrayRef<SgdSegment> segments, const SgdOptions& options,
              const float* gradient_coefficient, const double* nonfinite,
              c10::ScalarType working_dtype, Stream stream);

}  // namespace zero::kernels
