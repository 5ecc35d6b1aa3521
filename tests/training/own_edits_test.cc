// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What users do to gradients themselves between the calls of a ZeroOptimizer has torch's meaning or
// is refused: single cases of what user_sequence_test draws.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/warnings.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

struct TwoParameters : torch::nn::Module {
  explicit TwoParameters(c10::ScalarType dtype) {
    a = register_parameter("a", at::zeros({3}, dtype));
    b = register_parameter("b", at::zeros({5}, dtype));
  }
  // Gradients are the factors. A part with the factor 0 is not in the graph.
  at::Tensor loss(double of_a, double of_b) const {
    at::Tensor sum = at::zeros({}, a.options().requires_grad(false));
    if (of_a != 0) sum = sum + at::sum(a * of_a);
    if (of_b != 0) sum = sum + at::sum(b * of_b);
    return sum;
  }
  at::Tensor a, b;
};

class OwnRank {
 public:
  OwnRank(const Group& group, const ZeroOptions& options, c10::ScalarType dtype)
      : model(dtype),
        optimizer(
            model,
            std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(1.0)),
            group, options) {}

  void plain(double of_a, double of_b) { model.loss(of_a, of_b).backward(); }
  void own(double of_a, double of_b) { optimizer.backward(model.loss(of_a, of_b)); }
  void expect(double of_a, double of_b) {
    EXPECT_EQ(model.a.detach().to(at::kDouble).mean().item<double>(), of_a);
    EXPECT_EQ(model.b.detach().to(at::kDouble).mean().item<double>(), of_b);
  }

  TwoParameters model;
  ZeroOptimizer optimizer;
};

void on_ranks(const std::function<void(OwnRank&)>& body, c10::ScalarType dtype = at::kFloat,
              bool no_sync_fp32 = false) {
  for (const int64_t stage : {1, 2}) {
    for (const int world_size : {1, 2, 3}) {
      run_ranks(world_size, [&](const Group& group) {
        const auto options = ZeroOptions().stage(stage).no_sync_fp32(no_sync_fp32);
        OwnRank rank(group, options, dtype);
        body(rank);
      });
    }
  }
}

TEST(OwnEditsTest, AGradientThatWasKeptApartIsDroppedBeforeARoundCloses) {
  on_ranks(
      [](OwnRank& r) {
        {
          const auto guard = r.optimizer.no_sync();
          r.own(2, 0);
        }
        r.model.zero_grad();
        r.plain(0, 4);
        r.plain(0, 8);
        r.optimizer.step();
        r.expect(0, -12);
      },
      at::kBFloat16, /*no_sync_fp32=*/true);
}

TEST(OwnEditsTest, AReplacedPartOfAGradientIsRefusedByAPassOfOtherParameters) {
  on_ranks([](OwnRank& r) {
    r.own(2, 0);
    {
      const auto guard = r.optimizer.no_sync();
      r.own(4, 0);
    }
    r.model.a.mutable_grad() = at::full_like(r.model.a, 64);
    expect_words(error_of([&] { r.own(0, 8); }),
                 {"parameter a", "expected p.grad() as", "left it"});
    EXPECT_NE(error_of([&] { r.optimizer.step(); }), "");
    r.optimizer.zero_grad();
    r.own(16, 32);
    r.optimizer.step();
    r.expect(-16, -32);
  });
}

TEST(OwnEditsTest, MarkersAreNaNAgainAfterTheyWereFilled) {
  on_ranks([](OwnRank& r) {
    r.own(2, 4);
    r.model.zero_grad(/*set_to_none=*/false);
    expect_words(error_of([&] { r.optimizer.step(); }), {"expected p.grad() as", "left it"});
    r.model.zero_grad();
    r.own(8, 16);
    EXPECT_TRUE(r.model.a.grad().isnan().all().item<bool>()) << r.model.a.grad();
    EXPECT_TRUE(r.model.b.grad().isnan().all().item<bool>()) << r.model.b.grad();
    r.optimizer.step();
    r.expect(-8, -16);
  });
}

// As Python's p.grad.data.zero_() in place of zero_grad(). Neither raises a version.
TEST(OwnEditsTest, AFillOrAReplacementOfTheDataOfAMarkerIsRefused) {
  for (const bool fill : {true, false}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      on_ranks(
          [&](OwnRank& r) {
            r.own(2, 4);
            if (fill) {
              for (const at::Tensor& p : r.model.parameters()) p.grad().data().zero_();
            } else {
              r.model.b.grad().set_data(at::ones({5}, dtype));
            }
            expect_words(error_of([&] { r.optimizer.step(); }),
                         {"expected p.grad() as", "left it"});
            EXPECT_NE(error_of([&] { r.own(1, 1); }), "");
            r.optimizer.zero_grad();
            r.own(8, 16);
            for (const at::Tensor& p : r.model.parameters()) {
              EXPECT_TRUE(p.grad().isnan().all().item<bool>()) << p.grad();
              EXPECT_EQ(p.grad().stride(0), 0) << "memory for one number";
            }
            r.optimizer.step();
            r.expect(-8, -16);
          },
          dtype);
    }
  }
}

// Those of parameters that had none when others were filled and dropped, too.
TEST(OwnEditsTest, AFilledMarkerLeavesThoseOfOthersNaN) {
  constexpr bool kNoSyncFp32 = true;
  on_ranks(
      [](OwnRank& r) {
        {
          const auto guard = r.optimizer.no_sync();
          r.plain(2, 0);
        }
        EXPECT_TRUE(r.model.a.grad().isnan().all().item<bool>());
        r.model.zero_grad(/*set_to_none=*/false);
        r.model.zero_grad();
        r.plain(0, 4);
        EXPECT_TRUE(r.model.b.grad().isnan().all().item<bool>()) << r.model.b.grad();
        r.optimizer.step();
        r.expect(0, -4);
      },
      at::kBFloat16, kNoSyncFp32);
}

// Used without a gradient, it would move by its momentum.
TEST(OwnEditsTest, AGradientThatWasDroppedAfterACallThatFailedIsNotUsed) {
  on_ranks([](OwnRank& r) {
    auto& options = r.optimizer.param_groups()[0].options();
    static_cast<torch::optim::SGDOptions&>(options).momentum(0.5);
    r.own(1, 1);
    r.optimizer.step();
    r.expect(-1, -1);
    r.model.a.mutable_grad() = at::ones({3});
    expect_words(error_of([&] { r.optimizer.clip_grad_norm_(-1.0); }), {"max_norm: expected"});
    r.model.zero_grad();
    r.own(0, 1);
    r.optimizer.step();
    r.expect(-1, -2.5);
  });
}

// As kernels that write gradients into memory of their own have it: torch would use it in each
// step.
TEST(OwnEditsTest, AGradientThatWasPutThereOnceTrainsOneStepAndIsWarnedOf) {
  on_ranks([](OwnRank& r) {
    const auto put = [&] { r.model.b.mutable_grad() = at::full_like(r.model.b, 2); };
    const Warnings warnings;
    put();
    r.own(1, 0);
    r.optimizer.step();
    put();
    r.optimizer.step();
    r.expect(-1, -4);
    // Dropped ones, or those that a pass has added to, are not missed.
    put();
    r.own(0, 8);
    r.optimizer.step();
    r.expect(-1, -14);
    put();
    r.optimizer.reduce_gradients();
    r.optimizer.zero_grad();
    r.own(1, 0);
    r.optimizer.step();
    r.expect(-2, -14);
    // Nor are those that the program drops behind a step, as torch would.
    put();
    r.optimizer.step();
    r.optimizer.zero_grad();
    r.optimizer.step();
    r.expect(-2, -16);
    EXPECT_EQ(warnings.texts, std::vector<std::string>());
    put();
    for (int step = 0; step < 3; ++step) {
      r.optimizer.step();
      r.optimizer.zero_grad(/*set_to_none=*/false);
    }
    r.expect(-2, -18);
    ASSERT_EQ(warnings.texts.size(), 1U);
    expect_words(warnings.texts[0], {"step(): parameter b: expected a gradient in p.grad()",
                                     "no backward pass had made", "again before each step"});
  });
}

}  // namespace
}  // namespace zero
