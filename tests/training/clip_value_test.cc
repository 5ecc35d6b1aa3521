// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// clip_grad_value_() against torch::nn::utils::clip_grad_value_ on whole gradients, after each
// step.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kSteps = 4;

using Parameters = std::vector<at::Tensor>;

// Each gradient is given: about half of its elements are larger than 0.5.
struct GivenGradients final : torch::nn::Module {
  explicit GivenGradients(c10::ScalarType dtype) {
    const std::vector<std::vector<int64_t>> shapes = {{7, 5}, {19}, {}, {0}, {3, 2, 2}, {31}};
    for (const auto& shape : shapes) {
      const auto number = static_cast<uint64_t>(parameters().size());
      register_parameter("p" + std::to_string(number), random_tensor(shape, number).to(dtype));
    }
  }
  at::Tensor loss(int rank, int step) {
    at::Tensor sum = at::zeros({});
    const Parameters all = parameters();
    for (size_t i = 0; i < all.size(); ++i) {
      sum = sum + (all[i] * gradient(all[i], i, rank, step)).to(at::kFloat).sum();
    }
    return sum;
  }
  static at::Tensor gradient(const at::Tensor& p, size_t i, int rank, int step) {
    const auto seed = 1000 + 100 * static_cast<uint64_t>(step) + 10 * static_cast<uint64_t>(rank) +
                      static_cast<uint64_t>(i);
    return random_tensor(p.sizes(), seed).to(p.scalar_type());
  }
};

struct Case {
  int world_size = 2;
  bool adamw = false;
  c10::ScalarType dtype = at::kFloat;
  ZeroOptions options = {};
  // The clips of a step, in their order: > 0 by value, < 0 by norm.
  std::vector<double> clips{0.25};
};

std::unique_ptr<torch::optim::Optimizer> make(const Parameters& parameters, bool adamw) {
  using namespace torch::optim;
  if (adamw) return std::make_unique<AdamW>(parameters, AdamWOptions(0.02).weight_decay(0.05));
  return std::make_unique<SGD>(parameters, SGDOptions(0.1).momentum(0.9));
}

Parameters copies(const Parameters& parameters) {
  Parameters result;
  for (const at::Tensor& p : parameters) result.push_back(p.detach().clone());
  return result;
}

// Plain torch, with fp32 copies of the parameters.
std::vector<Parameters> plain(const Case& c) {
  GivenGradients model(c.dtype);
  Parameters masters;
  for (const at::Tensor& p : model.parameters()) {
    masters.push_back(p.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    masters.back().requires_grad_();
  }
  const auto inner = make(masters, c.adamw);
  std::vector<Parameters> result;
  for (int step = 0; step < kSteps; ++step) {
    for (size_t i = 0; i < masters.size(); ++i) {
      at::Tensor sum = at::zeros(masters[i].sizes());
      for (int rank = 0; rank < c.world_size; ++rank) {
        sum.add_(GivenGradients::gradient(model.parameters()[i], i, rank, step).to(at::kFloat));
      }
      masters[i].mutable_grad() = sum * (1.0 / c.world_size);
    }
    for (const double clip : c.clips) {
      if (clip > 0) {
        torch::nn::utils::clip_grad_value_(masters, clip);
      } else {
        torch::nn::utils::clip_grad_norm_(masters, -clip);
      }
    }
    inner->step();
    result.push_back(copies(masters));
  }
  return result;
}

void expect_equals_plain(const Case& c) {
  SCOPED_TRACE(c10::str("ranks ", c.world_size, " adamw ", c.adamw, " dtype ", c.dtype, " stage ",
                        c.options.stage(), " layout ", static_cast<int>(c.options.layout()),
                        " clips ", c.clips.size()));
  const std::vector<Parameters> expected = plain(c);
  run_ranks(c.world_size, [&](const Group& group) {
    GivenGradients model(c.dtype);
    ZeroOptimizer optimizer(model, make(model.parameters(), c.adamw), group, c.options);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.backward(model.loss(group.rank(), step));
      for (const double clip : c.clips) {
        if (clip > 0) {
          optimizer.clip_grad_value_(clip);
        } else {
          optimizer.clip_grad_norm_(-clip);
        }
      }
      optimizer.step();
      for (size_t i = 0; i < expected[step].size(); ++i) {
        const at::Tensor p = model.parameters()[i].detach();
        const at::Tensor master = optimizer.master(model.parameters()[i]);
        EXPECT_TRUE(at::allclose(master, expected[step][i], 1e-5, 1e-6))
            << "step " << step << " parameter " << i << " rank " << group.rank();
        EXPECT_TRUE(p.equal(master.to(c.dtype)));
      }
    }
    EXPECT_EQ(optimizer.stats().steps, kSteps);
  });
}

class ClipValueAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, ClipValueAt, ::testing::Values(1, 2, 3, 4));

// Class, stage and kernel take turns over dtypes, layouts and ranks.
TEST_P(ClipValueAt, EqualsPlainTorchAfterEachStep) {
  constexpr c10::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  for (int d = 0; d < 3; ++d) {
    for (const Layout layout :
         {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      const int turn = d + static_cast<int>(layout) + GetParam();
      Case c{GetParam(), turn % 2 == 0, kDtypes[d]};
      const bool fused = (turn / 2 + d) % 2 == 0;
      c.options.stage(1 + (turn + d) % 2).layout(layout).fused(fused).bucket_bytes(128);
      if (c.dtype == at::kHalf) c.options.loss_scaler(LossScalerOptions().initial_scale(256));
      expect_equals_plain(c);
    }
  }
}

TEST_P(ClipValueAt, ClipsByValueAndByNormAreInTheOrderOfTheCalls) {
  for (const std::vector<double>& clips : std::vector<std::vector<double>>{
           {0.3, -0.8}, {-0.8, 0.1}, {0.3, -0.8, 0.05, -0.2}, {0.2, 0.4}, {0.4, 0.2}, {100}}) {
    Case c{GetParam()};
    c.clips = clips;
    c.options.bucket_bytes(128);
    expect_equals_plain(c);
  }
}

// What gradient() shows is not clipped, and a norm after the clip is that of clipped values.
TEST_P(ClipValueAt, GradientsAreShownUnclippedAndNormsClipped) {
  run_ranks(GetParam(), [&](const Group& group) {
    GivenGradients model(at::kFloat);
    ZeroOptimizer optimizer(model, make(model.parameters(), false), group,
                            ZeroOptions().bucket_bytes(128));
    optimizer.backward(model.loss(0, 0));
    double square = 0, largest = 0;
    for (size_t i = 0; i < model.parameters().size(); ++i) {
      const at::Tensor p = model.parameters()[i];
      const at::Tensor clamped = GivenGradients::gradient(p, i, 0, 0).clamp(-0.25, 0.25);
      square += clamped.to(at::kDouble).pow(2).sum().item<double>();
      if (p.numel() > 0) largest = std::max(largest, clamped.abs().max().item<double>());
    }
    optimizer.clip_grad_value_(0.25);
    EXPECT_NEAR(optimizer.grad_norm().item<double>(), std::sqrt(square), 1e-5);
    EXPECT_NEAR(optimizer.grad_norm(kInfinity).item<double>(), largest, 1e-6);
    const at::Tensor first = model.parameters()[0];
    EXPECT_TRUE(at::allclose(optimizer.gradient(first), GivenGradients::gradient(first, 0, 0, 0),
                             1e-5, 1e-6));
    optimizer.step();
    // The next step knows nothing of it.
    optimizer.backward(model.loss(0, 1));
    square = 0;
    for (size_t i = 0; i < model.parameters().size(); ++i) {
      square += GivenGradients::gradient(model.parameters()[i], i, 0, 1)
                    .to(at::kDouble)
                    .pow(2)
                    .sum()
                    .item<double>();
    }
    EXPECT_NEAR(optimizer.grad_norm().item<double>(), std::sqrt(square), 1e-5);
  });
}

// A clamp makes a limit of an infinity; the step is skipped all the same, unless it need not.
TEST_P(ClipValueAt, AnInfinityOfOneRankSkipsTheStepOfAll) {
  for (const bool skips : {true, false}) {
    for (const bool with_norm : {false, true}) {
      run_ranks(GetParam(), [&](const Group& group) {
        GivenGradients model(at::kFloat);
        ZeroOptimizer optimizer(model, make(model.parameters(), false), group,
                                ZeroOptions().skip_nonfinite(skips).bucket_bytes(128));
        const at::Tensor before = model.parameters()[1].detach().clone();
        at::Tensor loss = model.loss(group.rank(), 0);
        if (group.rank() == group.world_size() - 1) {
          loss = loss + model.parameters()[1][3] * kInfinity;
        }
        optimizer.backward(loss);
        optimizer.clip_grad_value_(0.25);
        if (with_norm) {
          EXPECT_TRUE(std::isfinite(optimizer.clip_grad_norm_(1.0).item<double>()));
        }
        optimizer.step();
        EXPECT_EQ(optimizer.step_skipped(), skips);
        const at::Tensor after = model.parameters()[1].detach();
        EXPECT_EQ(before.equal(after), skips);
        if (!with_norm && !skips) {
          EXPECT_NEAR((before - after)[3].item<double>(), 0.1 * 0.25, 1e-6);
        }
        optimizer.backward(model.loss(group.rank(), 1));
        optimizer.clip_grad_value_(0.25);
        optimizer.step();
        EXPECT_FALSE(optimizer.step_skipped());
      });
    }
  }
}

// As with clip_grad_norm_(): what a later gradient adds is clipped with the rest.
TEST_P(ClipValueAt, AGradientPutInAfterTheClipIsClippedWithTheRest) {
  run_ranks(GetParam(), [&](const Group& group) {
    GivenGradients model(at::kFloat);
    ZeroOptimizer optimizer(model, make(model.parameters(), false), group,
                            ZeroOptions().bucket_bytes(128));
    const at::Tensor p = model.parameters()[0], late = model.parameters()[1];
    const at::Tensor before = late.detach().clone();
    optimizer.backward((p * 2.0).sum());
    optimizer.clip_grad_value_(0.5);
    late.mutable_grad() = at::full_like(late, 3.0);
    optimizer.step();
    EXPECT_TRUE(at::allclose(late.detach(), before - 0.1 * 0.5, 1e-6, 1e-6));
  });
}

TEST_P(ClipValueAt, WrongValuesAndWrongTimesAreRefusedOnAllRanks) {
  run_ranks(GetParam(), [&](const Group& group) {
    GivenGradients model(at::kFloat);
    ZeroOptimizer optimizer(model, make(model.parameters(), false), group);
    const bool bad = group.rank() == group.world_size() - 1;
    const auto clip = [&](double value) {
      return error_of([&] { optimizer.clip_grad_value_(value); });
    };
    expect_words(clip(1.0), {"clip_grad_value_()", "no backward pass", "before step()"});
    optimizer.backward(model.loss(group.rank(), 0));
    for (const double value : {0.0, -1.0, std::nan("")}) {
      expect_words(clip(bad ? value : 1.0), {"clip_value: expected a number above 0"});
    }
    if (group.world_size() > 1) {
      expect_words(clip(bad ? 2.0 : 1.0), {"clip_grad_value_() with clip_value 1",
                                           "clip_grad_value_() with clip_value 2"});
    }
    EXPECT_EQ(clip(0.25), "");
    expect_words(error_of([&] { optimizer.backward(model.loss(group.rank(), 0)); }),
                 {"backward() between a clip and step()"});
    EXPECT_NE(error_of([&] { optimizer.step(); }), "");
    EXPECT_EQ(error_of([&] { optimizer.step(); }), "");
    EXPECT_EQ(optimizer.stats().steps, 1);
  });
}

}  // namespace
}  // namespace zero
