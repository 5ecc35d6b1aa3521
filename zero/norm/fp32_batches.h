// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Values of other dtypes as fp32, many small tensors in one buffer, so that kernels run on long
// stretches: what a norm and a clip read and change.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "kernels/segments.h"

namespace zero {

// How many elements are copied at once: on a CPU 1 MiB of fp32, which stays in the cache of a core,
// elsewhere 64 MiB, since each batch is a few launches of kernels.
int64_t fp32_batch_numel(at::Device device);

class Fp32Batches {
 public:
  // `values` are all elements of a batch in a row, `spans` the same by what add() was called with.
  // Both are valid until the call returns; on a device, in the order of the current stream.
  using Use =
      std::function<void(const at::Tensor& values, const std::vector<kernels::ConstSpan>& spans)>;

  // For `numel` elements of `dtype` altogether, on `device`.
  Fp32Batches(at::Device device, c10::ScalarType dtype, int64_t numel, Use use);

  // Cuts at multiples of fp32_batch_numel(), of which kernels::kExactBlock is a divisor.
  void add(const void* values, int64_t numel);
  // The last batch.
  void flush();

 private:
  const c10::ScalarType dtype_;
  const Use use_;
  const at::Tensor buffer_;
  std::vector<kernels::CopySpan> copies_;
  std::vector<kernels::ConstSpan> spans_;
  int64_t filled_ = 0;
};

}  // namespace zero
