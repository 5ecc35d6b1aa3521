// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Collective calls outside of a step: reading parameters, comparing and refreshing replicas, the
// average, buffers. Each does what ZeroOptimizer's member of that name does. Internal.
#pragma once

#include <ATen/core/Tensor.h>

#include "zero/training/engine.h"

namespace zero {

// The master of `parameter`, or its averaged gradient, which is undefined where no rank used it.
at::Tensor gather_parameter(Engine& engine, const at::Tensor& parameter, bool gradient);
void check_replicas(Engine& engine);
void refresh_masters(Engine& engine);
void refresh_working(Engine& engine);
void broadcast_buffers(Engine& engine);
// Puts the average into the working parameters.
void use_ema(Engine& engine);
// Puts back what the masters say.
void end_ema(Engine& engine);
// The same for a destructor: where it fails, the communicators are closed. Never throws.
void end_ema_or_close(Engine& engine) noexcept;

}  // namespace zero
