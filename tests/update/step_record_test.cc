// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/step_record.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/reducer_options.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

ZeroOptions with_scale(double scale) {
  return ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(scale).growth_interval(2));
}

struct Record {
  explicit Record(const ZeroOptions& options_in, bool any_half = false, bool deferred_in = false)
      : options(options_in),
        deferred(deferred_in),
        flat({at::zeros({4})}, 1, {Layout::kContiguous, 0}),
        data(simulated_group(1).make_communicator("data", Purpose::kData)),
        reducer(flat.plan, flat.table, {{data.get(), nullptr, 0}}, flat.pool,
                reducer_options(flat.plan)),
        record(options, any_half, deferred, at::kCPU, 0, reducer) {}

  void step(bool skipped) {
    if (deferred) {
      record.add(at::scalar_tensor(skipped ? 1.0 : 0.0, at::kDouble));
    } else {
      record.add(skipped);
    }
    record.finish_step();
  }
  // What becomes of a gradient of 1.
  double gradient_scale() {
    flat.model.values[0].mutable_grad() = at::ones({4});
    reducer.gradient_ready(0);
    reducer.complete(1);
    reducer.consume();
    return reducer.shard(0)[0].item<double>();
  }
  void expect_scale(double scale) {
    EXPECT_EQ(record.scaler().scale(), scale);
    EXPECT_EQ(gradient_scale(), 1 / scale);
  }

  const ZeroOptions options;
  const bool deferred;
  FlatModel flat;
  const std::unique_ptr<Communicator> data;
  GradientReducer reducer;
  StepRecord record;
};

TEST(StepRecordTest, GradientsAreDividedByTheScaleThatFollowsSkippedSteps) {
  Record r(with_scale(1024));
  r.expect_scale(1024);
  r.step(true);
  r.expect_scale(512);
  r.step(false);
  r.expect_scale(512);
  r.step(false);
  r.expect_scale(1024);
  EXPECT_EQ(r.record.calls(), 3);
  EXPECT_EQ(r.record.counts().steps, 2);
  EXPECT_EQ(r.record.counts().skipped_steps, 1);
}

TEST(StepRecordTest, ADeferredStepIsFollowedWhenTheHostAsks) {
  Record r(with_scale(1024), false, true);
  r.step(true);
  r.expect_scale(1024);
  r.record.follow_loss_scale();
  r.expect_scale(512);
  r.record.follow_loss_scale();
  r.expect_scale(512);
  EXPECT_TRUE(r.record.counts().skipped);
}

TEST(StepRecordTest, TheScaleIsDynamicWhereAnyRankHasHalfPrecision) {
  Record half(ZeroOptions(), true);
  EXPECT_TRUE(half.record.scaler().dynamic());
  half.expect_scale(65536);
  Record none(ZeroOptions(), false), unchecked(ZeroOptions().skip_nonfinite(false), true);
  for (Record* constant : {&none, &unchecked}) {
    EXPECT_FALSE(constant->record.scaler().dynamic());
    constant->expect_scale(1);
  }
}

TEST(StepRecordTest, TooManySkippedStepsInARowThrowUnderAConstantScale) {
  Record r(ZeroOptions().max_skipped_in_a_row(2));
  r.step(true);
  r.step(true);
  expect_words(error_of([&] { r.step(true); }), {"rank 0: 3 steps in a row"});
  Record unchecked(ZeroOptions().max_skipped_in_a_row(2).skip_nonfinite(false));
  for (int step = 0; step < 5; ++step) unchecked.step(true);
}

TEST(StepRecordTest, DeferredSkipsAreNoticedWithin32Steps) {
  Record r(ZeroOptions().max_skipped_in_a_row(2), false, true);
  std::string error;
  int steps = 0;
  for (; steps < 40 && error.empty(); ++steps) error = error_of([&] { r.step(true); });
  expect_words(error, {"steps in a row were skipped"});
  EXPECT_LE(steps, 2 + 32);
}

TEST(StepRecordTest, AStepWithoutGradientsIsNotCountedAndIsTheLast) {
  for (const bool deferred : {false, true}) {
    Record r(ZeroOptions(), false, deferred);
    r.step(true);
    EXPECT_TRUE(r.record.counts().skipped);
    r.record.add_nothing();
    EXPECT_FALSE(r.record.counts().skipped);
    EXPECT_EQ(r.record.counts().skipped_steps, 1);
    EXPECT_EQ(r.record.calls(), 1);
  }
}

TEST(StepRecordTest, SkippedStepsOfACheckpointAreInNoRow) {
  Record r(ZeroOptions().max_skipped_in_a_row(2));
  r.record.restore({0, 5, true}, {}, false);
  r.step(true);
  r.step(true);
  expect_words(error_of([&] { r.step(true); }), {"3 steps in a row"});
}

TEST(StepRecordTest, ACheckpointRestoresCountsAndADynamicScale) {
  for (const bool deferred : {false, true}) {
    Record r(with_scale(1024), false, deferred);
    LossScaler::State scale = r.record.scaler().state();
    scale.scale = 256;
    r.record.restore({7, 3, true}, scale, true);
    r.expect_scale(256);
    EXPECT_EQ(r.record.calls(), 10);
    EXPECT_EQ(r.record.counts().steps, 7);
    EXPECT_EQ(r.record.counts().skipped_steps, 3);
    Record constant(ZeroOptions(), false, deferred);
    constant.record.restore({7, 3, true}, scale, false);
    constant.expect_scale(1);
  }
}

}  // namespace
}  // namespace zero
