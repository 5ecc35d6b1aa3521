// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/lion.h"

#include <c10/util/Exception.h>

#include "kernels/cpu/block_map.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/element_type.h"

namespace zero::kernels {
namespace {

void check_segments(c10::ArrayRef<LionSegment> segments) {
  for (const LionSegment& segment : segments) {
    TORCH_CHECK(segment.numel >= 0, "zero::kernels::lion_step: numel must be >= 0, got ",
                segment.numel);
    TORCH_CHECK(segment.numel == 0 || (segment.master != nullptr && segment.exp_avg != nullptr &&
                                       segment.gradient != nullptr),
                "zero::kernels::lion_step: null pointer for ", segment.numel, " elements");
  }
}

LionSegment part_of(const LionSegment& segment, int64_t begin, int64_t end, int64_t working_size) {
  LionSegment part = segment;
  part.master += begin;
  part.exp_avg += begin;
  part.gradient += begin;
  part.numel = end - begin;
  if (segment.working != nullptr) {
    part.working = static_cast<char*>(segment.working) + begin * working_size;
  }
  // A working pointer that is the master must stay recognisable whatever working_dtype says.
  if (segment.working == static_cast<void*>(segment.master)) {
    part.working = nullptr;
  }
  return part;
}

}  // namespace

void lion_step(c10::ArrayRef<LionSegment> segments, const LionOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype, Stream stream) {
  const ElementType working_type = element_type(working_dtype, "lion_step", "working_dtype");
  check_segments(segments);
  const auto count = static_cast<int64_t>(segments.size());
  const LionCoefficients c{static_cast<float>(1.0 - options.lr * options.weight_decay),
                           static_cast<float>(options.beta1),
                           static_cast<float>(1.0 - options.beta1),
                           static_cast<float>(options.beta2),
                           static_cast<float>(1.0 - options.beta2),
                           static_cast<float>(-options.lr)};
  if (stream.cuda) {
    const char* error = cuda::lion_step(segments.data(), count, c, gradient_coefficient, nonfinite,
                                        working_type, stream.handle);
    TORCH_CHECK(error == nullptr, "zero::kernels::lion_step: CUDA error: ", error);
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
    kernels.lion(part_of(segments[i], begin, end, element_size(working_type)), c, coefficient,
                 working_type);
  });
}

}  // namespace zero::kernels
