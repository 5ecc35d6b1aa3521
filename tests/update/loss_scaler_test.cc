// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The loss scale: the exact sequences of its rule, and that the scale which
// multiplied the loss is the one that is divided out.
#include "zero/update/loss_scaler.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// The scale after each outcome: '.' a good step, 'x' a skipped one.
std::vector<double> scales(LossScaler& scaler, const std::string& outcomes) {
  std::vector<double> result;
  for (char outcome : outcomes) {
    scaler.update(outcome == 'x');
    result.push_back(scaler.scale());
  }
  return result;
}

using Scales = std::vector<double>;

TEST(LossScalerTest, ConstantOneNeverChanges) {
  LossScaler scaler;
  EXPECT_FALSE(scaler.dynamic());
  EXPECT_EQ(scales(scaler, "..xxx..x"), Scales(8, 1.0));
}

TEST(LossScalerTest, HysteresisCountsBadStepsUntilTheScaleGrows) {
  LossScaler scaler(LossScalerOptions().initial_scale(64).growth_interval(2).hysteresis(3));
  // Used up by the third bad step, whatever good ones are between; then every bad step counts.
  EXPECT_EQ(scales(scaler, "x.xxx"), (Scales{64, 64, 64, 32, 16}));
  // Refilled by growth.
  EXPECT_EQ(scales(scaler, "..xxx"), (Scales{16, 32, 32, 32, 16}));
}

TEST(LossScalerTest, StaysBetweenItsBounds) {
  LossScaler scaler(
      LossScalerOptions().initial_scale(4).min_scale(3).max_scale(10).growth_interval(1));
  EXPECT_EQ(scales(scaler, "xxx....x"), (Scales{3, 3, 3, 6, 10, 10, 10, 5}));
}

TEST(LossScalerTest, ThrowsAfterTooManySkippedStepsAtTheMinimum) {
  LossScaler scaler(LossScalerOptions().initial_scale(2).min_scale(1).growth_interval(9),
                    /*max_skipped=*/2, /*rank=*/3);
  // The step that reaches the minimum does not count, and a good one starts anew.
  EXPECT_EQ(scales(scaler, "xxx.xx"), (Scales{1, 1, 1, 1, 1, 1}));
  expect_words(
      error_of([&] { scaler.update(true); }),
      {"rank 3: loss scaler: 3 steps in a row", "minimum scale 1", "diverged", "checkpoint"});
  EXPECT_EQ(scaler.scale(), 1.0);
}

TEST(LossScalerTest, StateContinuesTheSequence) {
  const auto options = LossScalerOptions().initial_scale(64).growth_interval(4).hysteresis(2);
  const std::string outcomes = "..x....xx...x....x....";
  for (size_t cut = 0; cut <= outcomes.size(); ++cut) {
    LossScaler whole(options), before(options), after(options);
    const Scales expected = scales(whole, outcomes);
    Scales got = scales(before, outcomes.substr(0, cut));
    after.set_state(before.state());
    for (double scale : scales(after, outcomes.substr(cut))) got.push_back(scale);
    EXPECT_EQ(got, expected) << "cut after " << cut;
  }
}

TEST(LossScalerTest, StateKeepsTheCountAtTheMinimum) {
  const auto options = LossScalerOptions().initial_scale(1);
  LossScaler before(options, 2), after(options, 2);
  scales(before, "xx");
  after.set_state(before.state());
  EXPECT_THROW(after.update(true), c10::Error);
}

// The options of a resumed run may be others.
TEST(LossScalerTest, ALoadedScaleIsMovedBetweenItsBounds) {
  const auto options = LossScalerOptions().initial_scale(8).min_scale(4).growth_interval(1);
  LossScaler scaler(LossScalerOptions(options).max_scale(16)),
      constant(LossScalerOptions(options).min_scale(8).max_scale(8));
  for (const auto& [loaded, expected] :
       std::vector<std::pair<double, double>>{{65536, 16}, {16, 16}, {5, 5}, {1, 4}}) {
    LossScaler::State state;
    state.scale = loaded;
    scaler.set_state(state);
    constant.set_state(state);
    EXPECT_EQ(scaler.scale(), expected);
    EXPECT_EQ(constant.scale(), 8);
  }
  EXPECT_EQ(scales(constant, ".x.x"), Scales(4, 8.0));
}

TEST(LossScalerTest, RefusesStatesAndOptionsThatMakeNoScale) {
  LossScaler scaler{LossScalerOptions()};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const LossScalerOptions o;
  const auto refused = [](const LossScalerOptions& bad, const std::string& expected) {
    expect_words(error_of([&] { LossScaler{bad}; }), {"loss scaler: expected " + expected});
  };
  const std::string ordered = "min_scale <= initial_scale <= max_scale";
  for (double scale : {0.0, -2.0, nan, infinity}) {
    LossScaler::State state;
    state.scale = scale;
    expect_words(error_of([&] { scaler.set_state(state); }),
                 {"loss scaler: expected a positive, finite scale, got"});
    refused(LossScalerOptions(o).initial_scale(scale), ordered);
    refused(LossScalerOptions(o).min_scale(scale), "a positive, finite min_scale, got");
  }
  EXPECT_EQ(scaler.scale(), 65536.0);
  refused(LossScalerOptions(o).growth_factor(0.5), "a growth_factor of at least 1, got 0.5");
  refused(LossScalerOptions(o).growth_factor(nan), "a growth_factor of at least 1, got nan");
  refused(LossScalerOptions(o).backoff_factor(0), "a backoff_factor between 0 and 1, got 0");
  refused(LossScalerOptions(o).backoff_factor(1), "a backoff_factor between 0 and 1, got 1");
  refused(LossScalerOptions(o).growth_interval(0), "a growth_interval of at least 1, got 0");
  refused(LossScalerOptions(o).hysteresis(0), "a hysteresis of at least 1, got 0");
  refused(LossScalerOptions(o).max_scale(100), ordered + ", got 1, 65536, 100");
  refused(LossScalerOptions(o).max_scale(infinity), "a finite max_scale, got inf");
  refused(LossScalerOptions(o).min_scale(100000), ordered + ", got 100000, 65536");
}

// torch.amp.GradScaler._amp_update_scale_, written down from its documentation.
TEST(LossScalerTest, WithHysteresisOneFollowsTheRuleOfGradScaler) {
  std::mt19937_64 random(7);
  LossScaler scaler(LossScalerOptions()
                        .growth_factor(8)
                        .backoff_factor(0.25)
                        .growth_interval(5)
                        .min_scale(0x1p-1000)
                        .max_scale(0x1p1000));
  double scale = 65536;
  int64_t tracker = 0;
  for (int i = 0; i < 2000; ++i) {
    const bool found_inf = random() % 7 == 0;
    if (found_inf) {
      scale *= 0.25;
      tracker = 0;
    } else if (++tracker == 5) {
      scale *= 8;
      tracker = 0;
    }
    scaler.update(found_inf);
    ASSERT_EQ(scaler.scale(), scale) << "step " << i;
  }
}

// --- In ZeroOptimizer

std::vector<at::Tensor> ones(const std::vector<c10::ScalarType>& dtypes) {
  std::vector<at::Tensor> result;
  for (auto dtype : dtypes) result.push_back(at::ones({50}, dtype));
  return result;
}

std::unique_ptr<torch::optim::Optimizer> sgd_of(const GivenGradients& model) {
  return std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(1e-3));
}

TEST(LossScalerTest, OnByDefaultForHalfAndConstantOneOtherwise) {
  run_ranks(2, [](const Group& group) {
    const auto scale_of = [&](const std::vector<c10::ScalarType>& dtypes, ZeroOptions options) {
      GivenGradients model(ones(dtypes));
      return ZeroOptimizer(model, sgd_of(model), group, options).loss_scale();
    };
    EXPECT_EQ(scale_of({at::kHalf}, {}), 65536.0);
    EXPECT_EQ(scale_of({at::kFloat, at::kHalf}, {}), 65536.0);
    EXPECT_EQ(scale_of({at::kFloat}, {}), 1.0);
    EXPECT_EQ(scale_of({at::kBFloat16, at::kFloat}, {}), 1.0);
    EXPECT_EQ(
        scale_of({at::kBFloat16}, ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(8))),
        8.0);
    // A scale that is never told of overflows must not grow.
    EXPECT_EQ(scale_of({at::kHalf}, ZeroOptions().skip_nonfinite(false)), 1.0);
  });
}

// The gradient of every step while the scale doubles in every second one.
TEST(LossScalerTest, TheScaleThatMultipliedTheLossIsDividedOut) {
  for (int world_size : {1, 2, 3}) {
    for (auto dtype : {at::kHalf, at::kFloat}) {
      for (bool plain : {false, true}) {
        SCOPED_TRACE(c10::str("W ", world_size, " ", dtype, " plain ", plain));
        run_ranks(world_size, [&](const Group& group) {
          GivenGradients model(ones({dtype}));
          ZeroOptimizer optimizer(
              model, sgd_of(model), group,
              ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(4).growth_interval(2)));
          at::Tensor expected_value = at::ones({50}, at::kDouble);
          double scale = 4;
          for (int step = 0; step < 9; ++step) {
            EXPECT_EQ(optimizer.loss_scale(), scale) << "step " << step;
            at::Tensor sum = at::zeros({50}, at::kDouble);
            for (int rank = 0; rank < group.world_size(); ++rank) {
              for (int micro = 0; micro < 2; ++micro) {
                // Few bits, so that no dtype rounds it whatever the scale.
                const at::Tensor factor =
                    at::round(random_tensor({50}, static_cast<unsigned>(step * 10 + rank + micro)) *
                              64) /
                    64;
                sum.add_(factor);
                if (rank != group.rank()) continue;
                const auto guard = optimizer.no_sync(step % 3 == 1 && micro == 0);
                const at::Tensor loss = model.loss({factor});
                if (plain) {
                  optimizer.scale_loss(loss).backward();
                } else if (micro == 0) {
                  optimizer.backward(loss);
                } else {
                  optimizer.backward({loss}, {at::ones({})});
                }
              }
            }
            const at::Tensor mean = sum / group.world_size();
            const at::Tensor gradient = optimizer.gradient(model.values[0]);
            EXPECT_TRUE(at::allclose(gradient.to(at::kDouble), mean, 1e-6, 1e-7))
                << "step " << step;
            optimizer.step();
            expected_value -= 1e-3 * mean;
            EXPECT_TRUE(at::allclose(optimizer.master(model.values[0]).to(at::kDouble),
                                     expected_value, 0, 1e-6))
                << "step " << step;
            if (step % 2 == 1) scale *= 2;
          }
          EXPECT_EQ(optimizer.stats().steps, 9);
        });
      }
    }
  }
}

// What the default scale makes of a loss in fp16: 65536 is infinite there.
TEST(LossScalerTest, LossInHalfFindsAScaleThatFits) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(ones({at::kHalf}));
    ZeroOptimizer optimizer(model, sgd_of(model), group);
    for (bool first : {true, false}) {
      optimizer.backward(at::sum(model.values[0] * 0.5));
      optimizer.step();
      EXPECT_EQ(optimizer.step_skipped(), first);
      EXPECT_EQ(optimizer.loss_scale(), 32768.0);
    }
    EXPECT_NEAR(optimizer.master(model.values[0])[0].item<double>(), 1 - 0.5e-3, 1e-7);
  });
}

TEST(LossScalerTest, StepThrowsOnAllRanksAfterTooManySkippedAtTheMinimum) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(ones({at::kHalf}));
    ZeroOptimizer optimizer(
        model, sgd_of(model), group,
        ZeroOptions().loss_scaler(LossScalerOptions().initial_scale(2)).max_skipped_in_a_row(2));
    const double infinity = std::numeric_limits<double>::infinity();
    for (int step = 0; step < 4; ++step) {
      optimizer.backward(model.loss({at::full({50}, group.rank() == 1 ? infinity : 1.0)}));
      if (step < 3) {
        optimizer.step();
        EXPECT_EQ(optimizer.loss_scale(), 1.0);
      } else {
        expect_words(error_of([&] { optimizer.step(); }),
                     {"rank " + std::to_string(group.rank()) + ": loss scaler: 3 steps in a row"});
      }
    }
    // The optimizer is still usable: good data helps.
    optimizer.backward(model.loss({at::ones({50})}));
    optimizer.step();
    EXPECT_FALSE(optimizer.step_skipped());
    EXPECT_NEAR(optimizer.master(model.values[0])[0].item<double>(), 1 - 1e-3, 1e-7);
  });
}

}  // namespace
}  // namespace zero
