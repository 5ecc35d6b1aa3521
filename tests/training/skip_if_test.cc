// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::skip_if(): a step that a rule leaves out on any rank changes nothing on any rank, to
// the bit. With static_graph the kernels learn it on the device, as on a GPU.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/state_snapshot.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr int64_t kSizes[] = {37, 70};

std::vector<at::Tensor> initial_values(c10::ScalarType dtype = at::kFloat) {
  return {random_tensor({kSizes[0]}, 1).to(dtype), random_tensor({kSizes[1]}, 2).to(dtype)};
}

// Of norms that go up and down by a tenth.
std::vector<at::Tensor> gradients(int rank, int step) {
  const double factor = 1 + 0.1 * (step % 2);
  return {random_tensor({kSizes[0]}, static_cast<uint64_t>(rank) + 3) * factor,
          random_tensor({kSizes[1]}, static_cast<uint64_t>(rank) + 20) * factor};
}

std::unique_ptr<torch::optim::Optimizer> inner_of(const GivenGradients& model, Inner inner) {
  using namespace torch::optim;
  if (inner == Inner::kAdamW) return std::make_unique<AdamW>(model.parameters(), 0.01);
  return std::make_unique<SGD>(model.parameters(), SGDOptions(0.1).momentum(0.9));
}

// Says what a function says, and keeps the norms that it is asked for.
class OwnRule final : public SkipRule {
 public:
  explicit OwnRule(std::function<at::Tensor(size_t call)> answer) : answer_(std::move(answer)) {}
  at::Tensor leaves_out(const at::Tensor& norm) override {
    norms.push_back(norm.item<double>());
    return answer_(norms.size() - 1);
  }
  std::string state() const override { return {}; }
  void set_state(const std::string&) override {}

  std::vector<double> norms;

 private:
  const std::function<at::Tensor(size_t)> answer_;
};

at::Tensor yes_if(bool yes) { return at::full({}, yes, at::kBool); }

class SkipIfAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, SkipIfAt, ::testing::Values(1, 2, 3, 4));

struct Setting {
  c10::ScalarType dtype;
  Inner inner;
  bool fused;
  int64_t stage;
  Layout layout;
  bool static_graph;
};
constexpr Setting kSettings[] = {
    {at::kFloat, Inner::kAdamW, true, 2, Layout::kContiguous, false},
    {at::kFloat, Inner::kAdamW, true, 1, Layout::kPerParameter, true},
    {at::kFloat, Inner::kSgdMomentum, false, 1, Layout::kContiguous, true},
    {at::kBFloat16, Inner::kSgdMomentum, true, 2, Layout::kContiguous, true},
    {at::kBFloat16, Inner::kAdamW, true, 1, Layout::kWholeParameters, false},
};

TEST_P(SkipIfAt, AnOutlierOnAnyRankChangesNothingOnAnyRank) {
  const int world_size = GetParam();
  for (const Setting& s : kSettings) {
    run_ranks(world_size, [&](const Group& group) {
      GivenGradients model(initial_values(s.dtype)), twin_model(initial_values(s.dtype));
      const auto options = ZeroOptions()
                               .stage(s.stage)
                               .layout(s.layout)
                               .fused(s.fused)
                               .static_graph(s.static_graph)
                               .bucket_bytes(128)
                               .loss_scaler(LossScalerOptions().initial_scale(16));
      ZeroOptimizer optimizer(
          model, inner_of(model, s.inner), group,
          ZeroOptions(options).skip_if(std::make_shared<OutlierRule>(6, /*window=*/4)));
      // The same good steps, and none of the bad ones.
      ZeroOptimizer twin(twin_model, inner_of(twin_model, s.inner), group, options);
      int skipped = 0;
      for (int step = 0; step < 16; ++step) {
        const bool clips = step % 3 == 0;
        for (auto* each : {&optimizer, &twin}) {
          const auto& m = each == &optimizer ? model : twin_model;
          each->backward(m.loss(gradients(group.rank(), step)));
          if (clips) each->clip_grad_norm_(0.5);
          each->step();
          EXPECT_FALSE(each->step_skipped()) << step;
        }
        EXPECT_TRUE(same_bits(everything(model, optimizer), everything(twin_model, twin))) << step;
        if (step % 8 != 5) continue;
        std::vector<at::Tensor> bad = gradients(group.rank(), step);
        if (group.rank() == skipped % world_size) bad[1][kSizes[1] - 1].fill_(1e4);
        optimizer.backward(model.loss(bad));
        if (skipped % 2 == 1) optimizer.clip_grad_norm_(0.5);
        optimizer.step();
        ++skipped;
        EXPECT_TRUE(optimizer.step_skipped());
        EXPECT_TRUE(same_bits(everything(model, optimizer), everything(twin_model, twin)));
        EXPECT_EQ(optimizer.stats().skipped_steps, skipped);
        EXPECT_EQ(optimizer.stats().steps, step + 1);
        EXPECT_EQ(optimizer.loss_scale(), 16);
      }
      EXPECT_EQ(skipped, 2);
      optimizer.check_replicas();
    });
  }
}

TEST_P(SkipIfAt, TheAnswerOfOneRankCountsForAll) {
  for (const bool static_graph : {false, true}) {
    run_ranks(GetParam(), [&](const Group& group) {
      GivenGradients model(initial_values());
      const auto rule = std::make_shared<OwnRule>(
          [&](size_t call) { return yes_if(call == 1 && group.rank() == GetParam() - 1); });
      ZeroOptimizer optimizer(model, inner_of(model, Inner::kAdamW), group,
                              ZeroOptions().static_graph(static_graph).skip_if(rule));
      for (int step = 0; step < 3; ++step) {
        optimizer.backward(model.loss(gradients(group.rank(), step)));
        optimizer.step();
        EXPECT_EQ(optimizer.step_skipped(), step == 1);
      }
      optimizer.check_replicas();
    });
  }
}

TEST_P(SkipIfAt, ARuleSeesTheNormBeforeClipsOnceAStep) {
  const int world_size = GetParam();
  run_ranks(world_size, [&](const Group& group) {
    GivenGradients model(initial_values());
    const auto rule = std::make_shared<OwnRule>([](size_t) { return yes_if(false); });
    ZeroOptimizer optimizer(model, inner_of(model, Inner::kAdamW), group,
                            ZeroOptions()
                                .skip_if(rule)
                                .loss_scaler(LossScalerOptions().initial_scale(8))
                                .bucket_bytes(100));
    std::vector<double> expected;
    for (int step = 0; step < 6; ++step) {
      double square = 0;
      for (size_t p = 0; p < 2; ++p) {
        at::Tensor sum = at::zeros({kSizes[p]}, at::kDouble);
        for (int r = 0; r < world_size; ++r) sum += gradients(r, step)[p].to(at::kDouble);
        square += (sum / world_size).square().sum().item<double>();
      }
      expected.push_back(std::sqrt(square));
      optimizer.backward(model.loss(gradients(group.rank(), step)));
      if (step == 1) optimizer.clip_grad_norm_(0.1);
      if (step == 2) optimizer.clip_grad_norm_(0.1, 1.0);
      if (step == 3) optimizer.clip_grad_value_(0.01);
      if (step == 4) {
        optimizer.clip_grad_value_(0.01);
        optimizer.clip_grad_norm_(0.01);
      }
      if (step == 5) optimizer.grad_norm(std::numeric_limits<double>::infinity());
      optimizer.step();
      ASSERT_EQ(rule->norms.size(), expected.size());
      EXPECT_NEAR(rule->norms.back(), expected.back(), 1e-6 * expected.back()) << step;
      optimizer.step();  // without gradients
      ASSERT_EQ(rule->norms.size(), expected.size());
    }
  });
}

// As where the two of a GAN are made with one ZeroOptions.
TEST(SkipIfTest, EachOptimizerNeedsARuleOfItsOwn) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial_values()), other(initial_values());
    const auto options = ZeroOptions().skip_if(std::make_shared<OutlierRule>());
    auto first =
        std::make_unique<ZeroOptimizer>(model, inner_of(model, Inner::kSgd), group, options);
    const auto make = [&] {
      return std::make_unique<ZeroOptimizer>(other, inner_of(other, Inner::kSgd), group, options);
    };
    expect_words(error_of(make),
                 {"rank " + std::to_string(group.rank()),
                  "skip_if: expected a rule of its own for each optimizer", "make one for each"});
    first.reset();  // the rule is free
    EXPECT_EQ(make()->stats().steps, 0);
  });
}

TEST(SkipIfTest, LeftOutStepsAreNotSkippedForNonfiniteGradients) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial_values());
    const auto rule = std::make_shared<OwnRule>([](size_t call) { return yes_if(call < 5); });
    ZeroOptimizer optimizer(model, inner_of(model, Inner::kAdamW), group,
                            ZeroOptions().skip_if(rule).max_skipped_in_a_row(2));
    const auto step = [&](double factor) {
      std::vector<at::Tensor> g = gradients(group.rank(), 0);
      g[0] = g[0] * factor;
      optimizer.backward(model.loss(g));
      optimizer.step();
    };
    for (int i = 0; i < 5; ++i) step(1);
    EXPECT_EQ(optimizer.stats().skipped_steps, 5);
    for (int i = 0; i < 2; ++i) step(std::nan(""));
    expect_words(error_of([&] { step(std::nan("")); }), {"3 steps in a row", "at most 2"});
  });
}

TEST(SkipIfTest, ALeftOutStepIsNoneForTheLossScale) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial_values());
    const auto rule = std::make_shared<OwnRule>([](size_t call) { return yes_if(call == 1); });
    ZeroOptimizer optimizer(model, inner_of(model, Inner::kAdamW), group,
                            ZeroOptions().skip_if(rule).loss_scaler(
                                LossScalerOptions().initial_scale(16).growth_interval(2)));
    std::vector<double> scales;
    for (int step = 0; step < 4; ++step) {
      optimizer.backward(model.loss(gradients(group.rank(), step)));
      optimizer.step();
      scales.push_back(optimizer.loss_scale());
    }
    // It grows with the second good step.
    EXPECT_EQ(scales, (std::vector<double>{16, 16, 32, 32}));
  });
}

// The others learn of it, and do not wait for the answer.
TEST(SkipIfTest, ARuleThatThrowsOrAnswersNothingEndsTheStepOnAllRanks) {
  for (const bool throws : {false, true}) {
    run_ranks(3, [&](const Group& group) {
      GivenGradients model(initial_values());
      const auto rule = std::make_shared<OwnRule>([&](size_t) {
        if (group.rank() != 1) return yes_if(false);
        TORCH_CHECK(!throws, "a rule that throws");
        return at::Tensor();
      });
      ZeroOptimizer optimizer(model, inner_of(model, Inner::kSgd), group,
                              ZeroOptions().skip_if(rule));
      optimizer.backward(model.loss(gradients(group.rank(), 0)));
      const std::string text = error_of([&] { optimizer.step(); });
      expect_words(text, {throws ? "a rule that throws" : "skip_if: expected a 0-dim answer"});
    });
  }
}

// Which would come again after going back: it is no CommunicationError later either.
TEST(SkipIfTest, ARuleThatThrowsNoStdExceptionLeavesAFailedOptimizer) {
  run_ranks(3, [&](const Group& group) {
    GivenGradients model(initial_values());
    const bool throws = group.rank() == 1;
    const auto rule = std::make_shared<OwnRule>([&](size_t) {
      if (throws) throw 1;
      return yes_if(false);
    });
    ZeroOptimizer optimizer(model, inner_of(model, Inner::kSgd), group,
                            ZeroOptions().skip_if(rule));
    optimizer.backward(model.loss(gradients(group.rank(), 0)));
    if (throws) {
      EXPECT_THROW(optimizer.step(), int);
    } else {
      EXPECT_THROW(optimizer.step(), CommunicationError);
    }
    bool of_communication = false;
    try {
      optimizer.step();
    } catch (const c10::Error& error) {
      of_communication = dynamic_cast<const CommunicationError*>(&error) != nullptr;
      expect_words(error.what(), {"expected a working optimizer", "no std::exception"});
    }
    EXPECT_EQ(of_communication, !throws);
  });
}

TEST(SkipIfTest, AResumeOnAnotherNumberOfRanksGoesOnWithTheWindow) {
  const std::string folder = ::testing::TempDir() + "/skip_if";
  std::filesystem::remove_all(folder);
  std::string saved;
  const auto run =
      [&](int world_size,
          const std::function<void(ZeroOptimizer&, OutlierRule&, const GivenGradients&)>& body) {
        run_ranks(world_size, [&](const Group& group) {
          GivenGradients model(initial_values());
          const auto rule = std::make_shared<OutlierRule>(6, /*window=*/8);
          ZeroOptimizer optimizer(model, inner_of(model, Inner::kAdamW), group,
                                  ZeroOptions().skip_if(rule));
          body(optimizer, *rule, model);
          if (group.rank() == 0) saved = rule->state();
        });
      };
  run(3, [&](ZeroOptimizer& optimizer, OutlierRule& rule, const GivenGradients& model) {
    for (int step = 0; step < 10; ++step) {
      optimizer.backward(model.loss(gradients(0, step)));
      optimizer.step();
    }
    optimizer.save_checkpoint(folder, SaveOptions().include("outliers", rule));
  });
  const std::string expected = saved;
  run(2, [&](ZeroOptimizer& optimizer, OutlierRule& rule, const GivenGradients& model) {
    optimizer.load_checkpoint(folder, LoadOptions().include("outliers", rule));
    EXPECT_EQ(rule.state(), expected);
    std::vector<at::Tensor> bad = gradients(0, 10);
    bad[0] = bad[0] * 50;
    optimizer.backward(model.loss(bad));
    optimizer.step();
    EXPECT_TRUE(optimizer.step_skipped());
  });
}

}  // namespace
}  // namespace zero
