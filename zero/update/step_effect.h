// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Notices a step() of a class that the library does not know and that updates other memory than the
// tensors of param_groups(): that of a flat buffer which it keeps of its parameters, or memory that
// it puts into them. Nothing would be trained, in silence.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <vector>

namespace zero {

class StepEffect {
 public:
  // `inner` must outlive this.
  explicit StepEffect(const torch::optim::Optimizer& inner);

  // Before and after inner.step(), which updates what has a gradient. end() throws c10::Error where
  // a parameter has other memory, and warns once where kIdle calls in a row with a learning rate
  // other than 0 have changed none. After a call that has changed one, both do nothing.
  void begin();
  void end();

  static constexpr int kIdle = 10;

 private:
  bool has_rate() const;

  const torch::optim::Optimizer& inner_;
  bool settled_;  // nothing more is looked for
  int idle_ = 0;  // calls in a row that have changed nothing
  // What has a gradient in the call under way, and how it was before.
  struct Stepped {
    at::Tensor parameter;
    const void* memory;
    int64_t version;
  };
  std::vector<Stepped> stepped_;
  at::Tensor copy_;  // of the first one, before the last idle call
};

}  // namespace zero
