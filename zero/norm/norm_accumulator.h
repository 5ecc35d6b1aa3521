// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Adds up a gradient norm in a form that ranks can reduce. For p < infinity each part is the sum of
// |x|^p in double and the number of x that are not finite; for infinity it is the bit pattern of
// max |x| as a double. Patterns of magnitudes are ordered like the magnitudes, with infinity and
// then NaN on top, so their integer maximum is exact and never loses a NaN as a maximum of floats
// would.
//
// Nothing here reads device memory on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "kernels/segments.h"
#include "zero/communicator.h"

namespace zero {

// [parts, 2] double, or [parts, 1] int64 for infinity: all parts empty.
at::Tensor empty_norm_parts(int64_t parts, double norm_type, at::Device device);

// Adds fp32 spans on the part's device. `weight` multiplies their sum, unused for infinity. With 0
// only the values that are not finite are counted.
void add_to_norm_part(const at::Tensor& part, const std::vector<kernels::ConstSpan>& spans,
                      double norm_type, double weight);

// Adds gradients of any real dtype and any strides on the part's device. fp32 is read in place,
// others are copied, fp32_batch_numel() elements at a time. Throws c10::Error for sparse and
// complex tensors.
void add_to_norm_part(const at::Tensor& part, const std::vector<at::Tensor>& gradients,
                      double norm_type);

// Collective over `group`. In place.
Pending all_reduce_norm_parts(const at::Tensor& parts, Communicator& group,
                              const std::string& label);

// One part made of all rows of [n, width].
at::Tensor combine_norm_parts(const at::Tensor& parts);

// The norm, 0-dim double on the part's device.
at::Tensor norm_of(const at::Tensor& part, double norm_type);

}  // namespace zero
