// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/sgd.h"

#include <c10/util/Exception.h>

#include "kernels/checks.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cpu/update_segments.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/element_type.h"
#include "kernels/detail/segment_parts.h"
#include "kernels/detail/state_checks.h"

namespace zero::kernels {
namespace {

void check_segments(c10::ArrayRef<SgdSegment> segments, const SgdOptions& options,
                    ElementType working_type) {
  for (const SgdSegment& segment : segments) {
    check_arrays("sgd_step", segment.numel, segment.gradient);
    if (segment.numel == 0) continue;
    check_state(segment, "sgd_step");
    check_master(segment, working_type, "sgd_step");
    TORCH_CHECK(options.momentum == 0.0 || segment.momentum != nullptr,
                "zero::kernels::sgd_step: momentum ", options.momentum, " needs its array");
  }
}

}  // namespace

void sgd_step(c10::ArrayRef<SgdSegment> segments, const SgdOptions& options,
              const float* gradient_coefficient, const double* nonfinite,
              c10::ScalarType working_dtype, Stream stream) {
  const ElementType working_type = element_type(working_dtype, "sgd_step", "working_dtype");
  check_segments(segments, options, working_type);
  SgdCoefficients c{static_cast<float>(-options.lr), static_cast<float>(options.momentum),
                    static_cast<float>(1.0 - options.dampening),
                    static_cast<float>(options.weight_decay), options.nesterov};
  const NoiseStep noise{options.noise_step, options.device_noise_step};
  const auto count = static_cast<int64_t>(segments.size());
  if (stream.cuda) {
    check_launch("sgd_step",
                 cuda::sgd_step(segments.data(), count, c, options.device_lr, gradient_coefficient,
                                nonfinite, noise, working_type, stream.handle));
    return;
  }
  if (options.device_lr != nullptr) c.negative_lr = static_cast<float>(-*options.device_lr);
  const RangeKernels& kernels = range_kernels();
  update_segments(
      segments, gradient_coefficient, nonfinite,
      [&](int64_t i, int64_t begin, int64_t end, float coefficient) {
        SgdSegment segment = segments[i];
        if (segment.device_step != nullptr) segment.first_step = *segment.device_step == 1.0F;
        if (segment.state_type != StateType::kFloat && c.momentum != 0.0F) {
          kernels.stored_sgd(with_written_working(segment), begin, end, noise, c, coefficient,
                             working_type);
          return;
        }
        kernels.sgd(part_of(segment, begin, end, element_size(working_type), &SgdSegment::momentum),
                    c, coefficient, working_type);
      });
}

}  // namespace zero::kernels
