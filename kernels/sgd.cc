// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/sgd.h"

#include <c10/util/Exception.h>

#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/element_type.h"

namespace zero::kernels {
namespace {

void check_segments(c10::ArrayRef<SgdSegment> segments, const SgdOptions& options) {
  for (const SgdSegment& segment : segments) {
    TORCH_CHECK(segment.numel >= 0, "zero::kernels::sgd_step: numel must be >= 0, got ",
                segment.numel);
    if (segment.numel == 0) {
      continue;
    }
    TORCH_CHECK(segment.master != nullptr && segment.gradient != nullptr,
                "zero::kernels::sgd_step: null pointer for ", segment.numel, " elements");
    TORCH_CHECK(options.momentum == 0.0 || segment.momentum != nullptr,
                "zero::kernels::sgd_step: momentum ", options.momentum, " needs its array");
  }
}

SgdSegment part_of(const SgdSegment& segment, int64_t begin, int64_t end, int64_t working_size) {
  SgdSegment part = segment;
  part.master += begin;
  part.gradient += begin;
  part.numel = end - begin;
  if (segment.momentum != nullptr) {
    part.momentum += begin;
  }
  if (segment.working != nullptr) {
    part.working = static_cast<char*>(segment.working) + begin * working_size;
  }
  // A working pointer that is the master must stay recognisable whatever working_dtype says.
  if (segment.working == static_cast<void*>(segment.master)) {
    part.working = nullptr;
  }
  if (segment.device_step != nullptr) {
    part.first_step = *segment.device_step == 1.0F;
  }
  return part;
}

}  // namespace

void sgd_step(c10::ArrayRef<SgdSegment> segments, const SgdOptions& options,
              const float* gradient_coefficient, const double* nonfinite,
              c10::ScalarType working_dtype, Stream stream) {
  const ElementType working_type = element_type(working_dtype, "sgd_step", "working_dtype");
  check_segments(segments, options);
  const SgdCoefficients c{static_cast<float>(-options.lr), static_cast<float>(options.momentum),
                          static_cast<float>(1.0 - options.dampening),
                          static_cast<float>(options.weight_decay), options.nesterov};
  const auto count = static_cast<int64_t>(segments.size());
  if (stream.cuda) {
    const char* error = cuda::sgd_step(segments.data(), count, c, gradient_coefficient, nonfinite,
                                       working_type, stream.handle);
    TORCH_CHECK(error == nullptr, "zero::kernels::sgd_step: CUDA error: ", error);
    return;
  }
  // Also true for NaN: when in doubt the step is skipped.
  if (nonfinite != nullptr && *nonfinite != 0.0) {
    return;
  }
  const float coefficient = gradient_coefficient != nullptr ? *gradient_coefficient : 1.0F;
  const RangeKernels& kernels = range_kernels();
  const BlockMap map(count, [&](int64_t i) { return segments[i].numel; });
  map.parallel_for_each_run([&](int64_t i, int64_t begin, int64_t end, int64_t) {
    kernels.sgd(part_of(segments[i], begin, end, element_size(working_type)), c, coefficient,
                working_type);
  });
}

}  // namespace zero::kernels
