// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A gradient that is not finite, on any one rank: nothing changes on any rank,
// to the bit, and training goes on as if that step had not been.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tests/support/fixed_gradients.h"
#include "tests/support/state_snapshot.h"
#include "tests/support/training.h"
#include "zero/adafactor.h"
#include "zero/combined_optimizer.h"
#include "zero/lamb.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kBadValues[] = {kNan, kInfinity, -kInfinity};

// The second parameter is a matrix with enough elements for ZeroOptions::moments.
std::vector<at::Tensor> initial_values(c10::ScalarType first, c10::ScalarType second) {
  return {random_tensor({37}, 1).to(first), random_tensor({60, 70}, 2).to(second)};
}

std::vector<at::Tensor> gradients(int rank, int step) {
  const auto seed = static_cast<uint64_t>(100 * rank + 10 * step);
  return {random_tensor({37}, seed + 3), random_tensor({60, 70}, seed + 4)};
}

std::unique_ptr<torch::optim::Optimizer> inner_of(const GivenGradients& model, Inner inner) {
  using namespace torch::optim;
  switch (inner) {
    case Inner::kAdamW:
      return std::make_unique<AdamW>(model.parameters(), AdamWOptions(0.01).weight_decay(0.1));
    case Inner::kLamb:
      return std::make_unique<Lamb>(model.parameters(), LambOptions(0.01));
    case Inner::kAdafactor:
      return std::make_unique<Adafactor>(model.parameters(), AdafactorOptions(0.01));
    case Inner::kMuon: {
      std::vector<std::unique_ptr<Optimizer>> parts;
      parts.push_back(std::make_unique<AdamW>(std::vector{model.values[0]}));
      parts.push_back(std::make_unique<Muon>(std::vector{model.values[1]}));
      return std::make_unique<CombinedOptimizer>(std::move(parts));
    }
    default:
      return std::make_unique<SGD>(model.parameters(),
                                   SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  }
}

class NonfiniteAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, NonfiniteAt, ::testing::Values(1, 2, 3));

struct Setting {
  c10::ScalarType first, second;
  Inner inner;
  ZeroOptions options;
};

std::vector<Setting> settings() {
  const auto in = [](Layout layout) { return ZeroOptions().layout(layout); };
  return {
      {at::kFloat, at::kFloat, Inner::kAdamW, {}},
      {at::kFloat, at::kFloat, Inner::kSgdMomentum,
       in(Layout::kPerParameter).fused(false).stage(1)},
      {at::kBFloat16, at::kFloat, Inner::kAdamW, ZeroOptions().stage(1)},
      {at::kBFloat16, at::kBFloat16, Inner::kSgdMomentum, in(Layout::kPerParameter)},
      {at::kHalf, at::kFloat, Inner::kAdamW, ZeroOptions().fused(false)},
      {at::kHalf, at::kHalf, Inner::kAdamW, in(Layout::kPerParameter).stage(1)},
      // With more that a step changes.
      {at::kFloat, at::kFloat, Inner::kAdamW,
       ZeroOptions().moments(Moments::kInt8).ema(EmaOptions())},
      {at::kBFloat16, at::kBFloat16, Inner::kAdamW,
       ZeroOptions().split_masters(true).moments(Moments::kBFloat16)},
      {at::kBFloat16, at::kBFloat16, Inner::kSgdMomentum,
       ZeroOptions().gradient_shard_dtype(at::kBFloat16)},
      {at::kFloat, at::kFloat, Inner::kMuon, ZeroOptions().moments(Moments::kInt8)},
      {at::kFloat, at::kFloat, Inner::kLamb, {}},
      {at::kBFloat16, at::kBFloat16, Inner::kAdafactor, {}},
      // Where the device alone knows of it.
      {at::kBFloat16, at::kBFloat16, Inner::kAdamW,
       ZeroOptions()
           .static_graph(true)
           .split_masters(true)
           .moments(Moments::kInt8)
           .ema(EmaOptions())},
  };
}

TEST_P(NonfiniteAt, EveryRankSkipsAndNothingChanges) {
  const int world_size = GetParam();
  // How the step is made: 0 without clipping, else after clip_grad_norm_ of this type.
  constexpr double kNormTypes[] = {0, 2, 1, 3, kInfinity};
  int cases = 0;
  const auto all = settings();
  for (const Setting& s : all) {
    // All at two ranks, and in turns at one and three.
    if (world_size != 2 && (&s - all.data() + world_size / 2) % 2 == 1) continue;
    run_ranks(world_size, [&](const Group& group) {
      GivenGradients model(initial_values(s.first, s.second)),
          twin_model(initial_values(s.first, s.second));
      // A constant scale, so that fp16 takes part in everything else.
      const auto options =
          ZeroOptions(s.options)
              .loss_scaler(
                  LossScalerOptions().initial_scale(16).min_scale(16).growth_interval(1000))
              .max_skipped_in_a_row(0)
              .bucket_bytes(4096);
      ZeroOptimizer optimizer(model, inner_of(model, s.inner), group, options);
      // The same good steps, and none of the bad ones.
      ZeroOptimizer twin(twin_model, inner_of(twin_model, s.inner), group, options);
      const auto good_step = [&](int step) {
        for (auto* pair : {&optimizer, &twin}) {
          auto& m = pair == &optimizer ? model : twin_model;
          pair->backward(m.loss(gradients(group.rank(), step)));
          pair->step();
          EXPECT_FALSE(pair->step_skipped());
        }
        EXPECT_TRUE(same_bits(all_bits(model, optimizer), all_bits(twin_model, twin)))
            << "good step " << step;
      };
      int step = 0;
      int skipped = 0;
      good_step(step++);
      for (int bad_rank = 0; bad_rank < world_size; ++bad_rank) {
        const auto before = all_bits(model, optimizer);
        for (int place = 0; place < 4; ++place) {  // first and last element of both parameters
          const double bad = kBadValues[(place + bad_rank) % 3];
          const double norm_type = kNormTypes[skipped % 5];
          SCOPED_TRACE(c10::str("setting ", &s - all.data(), " bad ", bad, " on rank ", bad_rank,
                                " place ", place, " norm ", norm_type));
          std::vector<at::Tensor> g = gradients(group.rank(), step);
          if (group.rank() == bad_rank) g[place / 2].view({-1})[-(place % 2)].fill_(bad);
          optimizer.backward(model.loss(g));
          if (norm_type != 0) {
            const double norm = optimizer.clip_grad_norm_(1.0, norm_type).item<double>();
            EXPECT_EQ(std::isnan(norm), std::isnan(bad)) << norm;
            EXPECT_FALSE(std::isfinite(norm));
          }
          optimizer.step();
          ++skipped;
          EXPECT_TRUE(optimizer.step_skipped());
          EXPECT_TRUE(same_bits(before, all_bits(model, optimizer)));
          EXPECT_EQ(optimizer.stats().skipped_steps, skipped);
        }
        good_step(step++);
      }
      if (!s.options.static_graph()) {
        optimizer.step();
        EXPECT_FALSE(optimizer.step_skipped()) << "a step without gradients";
      }
      optimizer.check_replicas();
      if (group.rank() == 0) cases += skipped;
    });
  }
  std::cout << "W " << world_size << ": " << cases << " skipped steps" << std::endl;
}

// Values that are finite in fp32 and not in what travels.
TEST_P(NonfiniteAt, OverflowOnTheWireIsSkippedToo) {
  run_ranks(GetParam(), [&](const Group& group) {
    GivenGradients model({at::ones({20})});
    ZeroOptimizer optimizer(model, inner_of(model, Inner::kAdamW), group,
                            ZeroOptions().reduce_dtype(at::kHalf));
    for (double value : {1e5, 1.0}) {
      const bool last = group.rank() == group.world_size() - 1;
      optimizer.backward(model.loss({at::full({20}, last ? value : 1.0)}));
      optimizer.step();
      EXPECT_EQ(optimizer.step_skipped(), value == 1e5);
    }
  });
}

// The last rank's first micro batch is the bad one.
TEST_P(NonfiniteAt, BadMicroBatchSpoilsTheWholeStep) {
  for (bool no_sync : {false, true}) {
    run_ranks(GetParam(), [&](const Group& group) {
      GivenGradients model({at::ones({20}, at::kBFloat16)});
      ZeroOptimizer optimizer(model, inner_of(model, Inner::kAdamW), group,
                              ZeroOptions().no_sync_fp32(true));
      const auto before = everything(model, optimizer);
      for (int micro = 0; micro < 3; ++micro) {
        const auto guard = optimizer.no_sync(no_sync);
        const bool bad = micro == 0 && group.rank() == group.world_size() - 1;
        optimizer.backward(model.loss({at::full({20}, bad ? -kInfinity : 1.0)}));
      }
      optimizer.step();
      EXPECT_TRUE(optimizer.step_skipped());
      EXPECT_TRUE(same_bits(before, everything(model, optimizer)));
    });
  }
}

// --- Switched off: what torch does, element by element

std::vector<at::Tensor> plain_torch(Inner inner, const std::vector<at::Tensor>& mean,
                                    std::optional<double> max_norm) {
  GivenGradients model(initial_values(at::kFloat, at::kFloat));
  const auto optimizer = inner_of(model, inner);
  double coefficient = 1;
  if (max_norm) {
    double square = 0;
    for (const at::Tensor& g : mean) square += g.to(at::kDouble).pow(2).sum().item<double>();
    const double factor = *max_norm / (std::sqrt(square) + 1e-6);
    coefficient = factor > 1 ? 1 : factor;  // a NaN stays one, as in torch's clamp
  }
  for (size_t i = 0; i < mean.size(); ++i) model.values[i].mutable_grad() = mean[i] * coefficient;
  optimizer->step();
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : model.values) result.push_back(p.detach().clone());
  return result;
}

TEST_P(NonfiniteAt, SwitchedOffFollowsTorch) {
  int turn = 0;
  for (bool fused : {true, false}) {
    for (std::optional<double> max_norm : {std::optional<double>(), std::optional(1.0)}) {
      for (double bad : kBadValues) {
        const Inner inner = turn++ % 2 == 0 ? Inner::kAdamW : Inner::kSgdMomentum;
        run_ranks(GetParam(), [&](const Group& group) {
          GivenGradients model(initial_values(at::kFloat, at::kFloat));
          ZeroOptimizer optimizer(model, inner_of(model, inner), group,
                                  ZeroOptions().skip_nonfinite(false).fused(fused));
          std::vector<at::Tensor> mean = {at::zeros({37}), at::zeros({60, 70})};
          for (int rank = 0; rank < group.world_size(); ++rank) {
            std::vector<at::Tensor> g = gradients(rank, 0);
            if (rank == group.world_size() - 1) g[1][0][5].fill_(bad);
            for (size_t i = 0; i < g.size(); ++i) mean[i].add_(g[i], 1.0 / group.world_size());
            if (rank == group.rank()) optimizer.backward(model.loss(g));
          }
          if (max_norm) optimizer.clip_grad_norm_(max_norm);
          optimizer.step();
          EXPECT_FALSE(optimizer.step_skipped());
          const auto expected = plain_torch(inner, mean, max_norm);
          for (size_t i = 0; i < expected.size(); ++i) {
            EXPECT_TRUE(at::allclose(model.values[i].detach(), expected[i], 1e-5, 1e-6,
                                     /*equal_nan=*/true))
                << "parameter " << i << " bad " << bad << " fused " << fused << " clip "
                << max_norm.value_or(0) << " inner " << static_cast<int>(inner);
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace zero
