// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "kernels/adam.h"

#include <c10/util/Exception.h>

#include <vector>

#include "kernels/checks.h"
#include "kernels/cpu/cpu_capability.h"
#include "kernels/cpu/update_segments.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/detail/bias_correction.h"
#include "kernels/detail/element_type.h"
#include "kernels/detail/segment_parts.h"
#include "kernels/detail/state_checks.h"

namespace zero::kernels {
namespace {

void check_segments(c10::ArrayRef<AdamSegment> segments, const AdamOptions& options,
                    ElementType working_type) {
  for (const AdamSegment& segment : segments) {
    check_arrays("adam_step", segment.numel, segment.exp_avg, segment.exp_avg_sq, segment.gradient);
    TORCH_CHECK(segment.device_step != nullptr || segment.step >= 1,
                "zero::kernels::adam_step: step counts this update too, so it must be >= 1, got ",
                segment.step);
    TORCH_CHECK(segment.device_step != nullptr || options.device_lr == nullptr,
                "zero::kernels::adam_step: device_lr needs device_step");
    if (segment.numel == 0) continue;
    check_state(segment, "adam_step");
    check_master(segment, working_type, "adam_step");
    TORCH_CHECK(!options.amsgrad || segment.max_exp_avg_sq != nullptr,
                "zero::kernels::adam_step: amsgrad needs max_exp_avg_sq");
  }
}

// All but the two fields that depend on the step.
AdamCoefficients coefficients_of(const AdamOptions& options) {
  AdamCoefficients c{};
  c.decay = decay_of(options.lr, options.weight_decay);
  c.weight_decay = static_cast<float>(options.weight_decay);
  c.beta1 = static_cast<float>(options.beta1);
  c.one_minus_beta1 = static_cast<float>(1.0 - options.beta1);
  c.beta2 = static_cast<float>(options.beta2);
  c.one_minus_beta2 = static_cast<float>(1.0 - options.beta2);
  c.eps = static_cast<float>(options.eps);
  c.amsgrad = options.amsgrad;
  c.decoupled = options.decoupled;
  return c;
}

}  // namespace

void adam_step(c10::ArrayRef<AdamSegment> segments, const AdamOptions& options,
               const float* gradient_coefficient, const double* nonfinite,
               c10::ScalarType working_dtype, Stream stream) {
  const ElementType working_type = element_type(working_dtype, "adam_step", "working_dtype");
  check_segments(segments, options, working_type);
  const NoiseStep noise{options.noise_step, options.device_noise_step};
  const auto count = static_cast<int64_t>(segments.size());
  if (stream.cuda) {
    check_launch("adam_step",
                 cuda::adam_step(segments.data(), count, coefficients_of(options),
                                 {options.lr, options.beta1, options.beta2},
                                 {options.device_lr, options.weight_decay}, gradient_coefficient,
                                 nonfinite, noise, working_type, stream.handle));
    return;
  }
  AdamOptions known = options;
  if (options.device_lr != nullptr) known.lr = *options.device_lr;
  const AdamPowers powers{known.lr, known.beta1, known.beta2};
  std::vector<AdamCoefficients> coefficients(segments.size(), coefficients_of(known));
  for (size_t i = 0; i < segments.size(); ++i) {
    const AdamSegment& segment = segments[i];
    const double step = segment.device_step != nullptr ? static_cast<double>(*segment.device_step)
                                                       : static_cast<double>(segment.step);
    set_bias_correction(powers, step, coefficients[i]);
  }
  const RangeKernels& kernels = range_kernels();
  update_segments(segments, gradient_coefficient, nonfinite,
                  [&](int64_t i, int64_t begin, int64_t end, float coefficient) {
                    if (segments[i].state_type != StateType::kFloat) {
                      kernels.stored_adam(with_written_working(segments[i]), begin, end, noise,
                                          coefficients[i], coefficient, working_type);
                      return;
                    }
                    kernels.adam(part_of(segments[i], begin, end, element_size(working_type),
                                         &AdamSegment::exp_avg, &AdamSegment::exp_avg_sq,
                                         &AdamSegment::max_exp_avg_sq),
                                 coefficients[i], coefficient, working_type);
                  });
}

}  // namespace zero::kernels
