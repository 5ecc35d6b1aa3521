// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Notices a step() of the inner optimizer that its ZeroOptimizer did not make, through a pointer
// that the user kept. Master segments have no gradients between steps, so such a call would do
// nothing, and nothing would ever be trained, in silence.
//
// The trap is one more parameter of the inner optimizer, a 0 in host memory that has a gradient:
// the call changes it, unless its learning rate is 0.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>

namespace zero {

class InnerStepTrap {
 public:
  // Adds the trap to the first parameter group of `inner` whose class takes it, or to the first of
  // all if none does. `inner` must outlive this.
  explicit InnerStepTrap(torch::optim::Optimizer& inner);

  // Before the ZeroOptimizer itself calls inner.step().
  void disarm();
  // After it, and whenever the user may have called inner.zero_grad(), which disarms it.
  void arm();
  // Returns whether inner.step() was called while it was armed; says so once.
  bool sprung();

 private:
  torch::optim::Optimizer& inner_;
  const int64_t group_;
  const at::Tensor parameter_;
  const at::Tensor gradient_;
  // The only elements of the two. Each gradient of the model asks for them.
  float* const value_;
  float* const gradient_value_;
};

}  // namespace zero
