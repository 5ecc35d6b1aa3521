// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/lion.h"

#include "kernels/checks.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cpu/update_segments.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/element_type.h"
#include "kernels/detail/segment_parts.h"
#include "kernels/detail/state_checks.h"

namespace zero::kernels {
namespace {

void check_segments(c10::ArrayRef<LionSegment> segments, ElementType working_type) {
  for (const LionSegment& segment : segments) {
    check_arrays("lion_step", segment.numel, segment.exp_avg, segment.gradient);
    if (segment.numel == 0) continue;
    check_state(segment, "lion_step");
    check_master(segment, working_type, "lion_step");
  }
}

}  // namespace

void lion_step(c10::ArrayRef<LionSegment> segments, const LionOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype, Stream stream) {
  const ElementType working_type = element_type(working_dtype, "lion_step", "working_dtype");
  check_segments(segments, working_type);
  const NoiseStep noise{options.noise_step, options.device_noise_step};
  const auto count = static_cast<int64_t>(segments.size());
  LionCoefficients c{decay_of(options.lr, options.weight_decay), static_cast<float>(options.beta1),
                     static_cast<float>(1.0 - options.beta1),    static_cast<float>(options.beta2),
                     static_cast<float>(1.0 - options.beta2),    static_cast<float>(-options.lr)};
  if (stream.cuda) {
    check_launch(
        "lion_step",
        cuda::lion_step(segments.data(), count, c, {options.device_lr, options.weight_decay},
                        gradient_coefficient, nonfinite, noise, working_type, stream.handle));
    return;
  }
  if (options.device_lr != nullptr) set_rate(*options.device_lr, options.weight_decay, c);
  const RangeKernels& kernels = range_kernels();
  update_segments(segments, gradient_coefficient, nonfinite,
                  [&](int64_t i, int64_t begin, int64_t end, float coefficient) {
                    if (segments[i].state_type != StateType::kFloat) {
                      kernels.stored_lion(with_written_working(segments[i]), begin, end, noise, c,
                                          coefficient, working_type);
                      return;
                    }
                    kernels.lion(part_of(segments[i], begin, end, element_size(working_type),
                                         &LionSegment::exp_avg),
                                 c, coefficient, working_type);
                  });
}

}  // namespace zero::kernels
