// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What a run with ZeroOptions::moments must compute: fused updates of whole parameters in one
// process, with averages in fewer bytes, by the loops of tests/kernels. Gradients that are exact in
// fp32 make every bit known, and rounding leaves no difference.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/support/training.h"

namespace zero {

class PlainMoments {
 public:
  // Parameter i has numels[i] elements.
  PlainMoments(Inner inner, const std::vector<std::string>& names,
               const std::vector<int64_t>& numels, Moments moments);

  // What a clip makes of a gradient g: clamp(g, -bound, bound) * coefficient.
  struct Clip {
    double bound;
    double coefficient;
  };
  // Updates `master`, fp32 values in double, of parameter i in step `step` of the run.
  void step(size_t i, const at::Tensor& master, const at::Tensor& gradient, const Clip& clip,
            const torch::optim::OptimizerOptions& options, int64_t step);
  // A load into a run with other moments.
  void convert(Moments to);
  // Rows of parameter i go and come, with zeros where `rows` is -1; it had `row` elements each.
  void select(size_t i, const at::Tensor& rows, int64_t row);
  // Parameter i leaves, and comes back without state.
  void freeze(size_t i);

 private:
  struct State {
    int64_t numel = 0;
    Moments format = Moments::kFloat32;
    at::Tensor first, second;  // as they are stored, in bytes
    at::Tensor largest;        // of amsgrad, fp32
    int64_t count = 0;
  };

  const Inner inner_;
  std::vector<int64_t> noise_numbers_;
  Moments moments_;
  std::vector<State> states_;
};

}  // namespace zero
