// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// An exponential moving average of flat fp32 segments, in one pass over memory.
//
// For each element, every operation rounded to fp32 and none fused:
//
//   average = average + weight * (value - average)
//
// The bits are the same for every instruction set and thread count, for every
// way of cutting an array into segments, and on CUDA.
#pragma once

#include <c10/util/ArrayRef.h>

#include "kernels/segments.h"
#include "kernels/stream.h"

namespace zero::kernels {

// Updates every segment. Where `device_weight` is not null it points to the weight, in memory of
// the stream's kind, and `weight` is not looked at. With a weight of 0 nothing is written, whatever
// the values are.
void ema_step(c10::ArrayRef<EmaSegment> segments, float weight, const float* device_weight,
              Stream stream);

}  // namespace zero::kernels
