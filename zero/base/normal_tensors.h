// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Turns the caller's c10::InferenceMode off, for tensors that outlive a call.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace zero {

// While it lives, new tensors can be used outside of InferenceMode, and gradients are recorded as
// before.
class NormalTensors {
 public:
  NormalTensors() {
    if (c10::InferenceMode::is_enabled()) off_.emplace();
  }

 private:
  struct Off {
    const bool grad = at::GradMode::is_enabled();
    const c10::InferenceMode off{false};  // which also enables gradients
    const at::AutoGradMode as_before{grad};
  };
  std::optional<Off> off_;
};

}  // namespace zero
