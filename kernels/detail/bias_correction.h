// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Private: the two scalars of Adam that depend on the step count, computed in
// double and rounded once; on the host, or on the device where the count lives there.
#pragma once

#include <math.h>

#include "kernels/detail/update_rules.h"

namespace zero::kernels {

ZERO_KERNELS_INLINE void set_bias_correction(const AdamPowers& powers, double step,
                                             AdamCoefficients& coefficients) {
  coefficients.sqrt_bias_correction2 = static_cast<float>(sqrt(1.0 - pow(powers.beta2, step)));
  coefficients.negative_step_size =
      static_cast<float>(-(powers.lr / (1.0 - pow(powers.beta1, step))));
}

}  // namespace zero::kernels
