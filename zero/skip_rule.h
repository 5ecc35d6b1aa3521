// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Rules that leave out a step whose gradient looks wrong, on all ranks or on none.
//
//   auto outliers = std::make_shared<zero::OutlierRule>();
//   zero::ZeroOptimizer optimizer(*model, std::move(adamw), group,
//                                 zero::ZeroOptions().skip_if(outliers));
//   optimizer.save_checkpoint(folder, zero::SaveOptions().include("outliers", *outliers));
//   optimizer.load_checkpoint(folder, zero::LoadOptions().include("outliers", *outliers));
//
// A step that is left out is a skipped step: parameters, state and counts of updates stay as they
// were, step_skipped() is true, and Stats::skipped_steps counts it. The loss scale stays, and
// max_skipped_in_a_row() does not count it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "zero/checkpoint_options.h"

namespace zero {

// A rule for ZeroOptions::skip_if(). Its state is also in protected steps, so that recover() and
// processes that join go on with it.
class SkipRule : public Stateful {
 public:
  // Returns whether to leave out the step: 0-dim, not 0 for yes. step() leaves it out on all ranks
  // if any rank says yes. `norm` is the 2-norm of the averaged gradient before clips, 0-dim double
  // beside the parameters, and has the same bits on all ranks. It is NaN or infinite where the
  // gradient is.
  //
  // step() calls it once on every rank, if any rank made a backward pass since the last one. On a
  // GPU step() waits for the answer only where the inner optimizer has no kernels, as Muon, so a
  // rule that computes with tensors beside `norm` costs no other wait, and one that reads `norm` on
  // the host waits for the device. If it throws, the optimizer ends.
  virtual at::Tensor leaves_out(const at::Tensor& norm) = 0;
};

// Leaves out a step whose gradient norm, or loss, is far above those of the steps before it:
//
//   x > mean + sigmas * deviation
//
// with the mean and the standard deviation (n - 1 in the divisor) of the last `window` values, in
// double. Values of steps that were left out are among them, so that a new level is accepted after
// some steps; values that are not finite are not. It starts when half a window is known, and not
// before 20 values unless the window is smaller. On a GPU it waits for nothing.
// Source: Team OLMo, "2 OLMo 2 Furious", 2024, and SkipStepOptimizer of OLMo-core, where values far
// below the mean are left out too.
class OutlierRule final : public SkipRule {
 public:
  // Throws c10::Error for sigmas that are not above 0 and a window below 2.
  explicit OutlierRule(double sigmas = 6, int64_t window = 128);

  // The loss of the next step(), which is then judged beside the norm. One element, on any device,
  // equal on all ranks: their mean, for example.
  void set_loss(const at::Tensor& loss) { loss_ = loss; }

  at::Tensor leaves_out(const at::Tensor& norm) override;
  // The values of both windows. A rule with a smaller window takes over the newest.
  std::string state() const override;
  void set_state(const std::string& state) override;

 private:
  struct Window {
    at::Tensor values;  // [window] double, the newest last; undefined before the first
    at::Tensor known;   // 0-dim double: how many of them, from the end
  };
  // Returns whether `value` is an outlier, 0-dim bool, and adds it to `window`.
  at::Tensor judge(Window& window, const at::Tensor& value) const;

  const double sigmas_;
  const int64_t window_;
  Window norms_, losses_;
  at::Tensor loss_;  // undefined where none was set
};

}  // namespace zero
