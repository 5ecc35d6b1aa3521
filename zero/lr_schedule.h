// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Learning-rate schedules whose state a checkpoint can hold. Those of torch's C++ library have no
// state to save, and neither warm-up nor cosine.
//
//   LrSchedule schedule(optimizer, linear_warmup(1000, cosine_decay(99000)));
//   for (...) {
//     optimizer.step();
//     schedule.step();
//   }
//   optimizer.save_checkpoint(folder, SaveOptions().include("schedule", schedule));
//
// A schedule is a pure function of the step, so that a resumed run has the learning rates of one
// that never stopped, in every bit. Any function can be one:
//
//   LrSchedule schedule(optimizer, [](int64_t step) { return 1.0 / std::sqrt(step + 1.0); });
#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "zero/checkpoint_options.h"

namespace zero {

// The factor on the base learning rate in step `step`, counted from 0. The same step must always
// give the same factor.
using LrFactor = std::function<double(int64_t step)>;

// `factor` in every step.
LrFactor constant_lr(double factor = 1.0);
// gamma ^ (step / step_size), rounded down: torch's StepLR in Python. That of C++ makes each drop
// one step later.
LrFactor step_decay(int64_t step_size, double gamma);
// From 1 in step 0 to `final_factor` in step `steps` in a straight line, and `final_factor` from
// then on: torch's LinearLR(start_factor=1, end_factor=final_factor, total_iters=steps).
LrFactor linear_decay(int64_t steps, double final_factor = 0.0);
// The same along half a cosine: torch's CosineAnnealingLR(T_max=steps, eta_min=final_factor * lr),
// which stays at its end instead of rising again.
LrFactor cosine_decay(int64_t steps, double final_factor = 0.1);
// (step + 1) / warmup_steps in the first `warmup_steps` steps, so that the first step trains too;
// then `after`, counted from 0 again: torch's SequentialLR after
// LinearLR(start_factor=1 / warmup_steps, total_iters=warmup_steps - 1).
LrFactor linear_warmup(int64_t warmup_steps, LrFactor after);

// Sets the learning rates of an optimizer for each step, and is saved with a checkpoint.
class LrSchedule final : public Stateful {
 public:
  // The learning rates that `optimizer`'s groups have now are the base; those of step 0 are set at
  // once. Make the schedule before a checkpoint is loaded: a load sets other learning rates.
  // `optimizer`, a ZeroOptimizer or any of torch's, must outlive the schedule. Groups that are
  // added later have the same factor, and as base the learning rates that they have in the next
  // step() or set_step(), which they keep until then. Call it between a load and
  // add_param_group(), whichever is first: it throws c10::Error where something else than this
  // schedule has set the learning rates of the other groups.
  LrSchedule(torch::optim::Optimizer& optimizer, LrFactor factor);
  // One factor for each parameter group. step() throws once a group is added.
  LrSchedule(torch::optim::Optimizer& optimizer, std::vector<LrFactor> factors);

  // Sets the learning rates of the next step. Call it after every optimizer.step().
  void step() { set_step(step_ + 1); }
  // Sets the learning rates of step `step`, as after `step` calls of step(). One that is not finite
  // is set as well: a factor may have none behind the last step. ZeroOptimizer::step() refuses it,
  // and a checkpoint with it loads with LoadOptions::restore_options(false) alone.
  void set_step(int64_t step);
  // The number of step() calls so far, those before a checkpoint included.
  int64_t steps() const { return step_; }

  // The step and its learning rates.
  std::string state() const override;
  // Throws c10::Error for the state of a schedule that has other learning rates in that step. To go
  // on with another schedule, leave it out of the load and call set_step().
  void set_state(const std::string& state) override;

 private:
  std::vector<double> bases() const;
  std::vector<double> rates(int64_t step) const;

  torch::optim::Optimizer& optimizer_;
  LrFactor of_all_;                // empty with one factor for each group
  std::vector<LrFactor> factors_;  // by group, of those of construction
  std::vector<double> base_;       // by group, of those of the last set_step()
  int64_t step_ = 0;
};

}  // namespace zero
