// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/training/backward.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/training/backward_rank.h"

namespace zero {
namespace {

TEST(BackwardPassesTest, APassHandsTheGradientsOfAllRanksToTheirShardsAndClosesItsRound) {
  for (const int world_size : {1, 2, 3}) {
    on_ranks(world_size, [](Rank& r) {
      for (const int pass : {0, 1}) {
        r.passes->run(r.loss(pass));
        EXPECT_EQ(r.reducer.rounds_sent(), pass + 1);
        r.expect_mean({pass});
      }
      r.passes->run(r.loss(0));
      r.passes->run(r.loss(1));
      r.expect_mean({0, 1});
    });
  }
}

TEST(BackwardPassesTest, TheRoundOfAPlainBackwardStaysOpenUntilThePassThatFollows) {
  on_ranks(2, [](Rank& r) {
    r.loss(0).backward();
    EXPECT_EQ(r.reducer.rounds_sent(), 0);
    EXPECT_EQ(r.reducer.rounds_needed(), 1);
    r.expect_mean({0});
    EXPECT_EQ(r.reducer.rounds_sent(), 1);
    // Another parameter, which would have room in the open round.
    r.loss_of(0, 0).backward();
    r.passes->run(r.loss_of(1, 0));
    EXPECT_EQ(r.reducer.rounds_sent(), 3);
  });
}

TEST(BackwardPassesTest, ALossWithoutAGraphSendsZeros) {
  on_ranks(2, [](Rank& r) {
    r.passes->run(r.rank() == 0 ? r.loss(0) : at::zeros({}));
    EXPECT_EQ(r.reducer.rounds_sent(), 1);
    EXPECT_EQ(r.reducer.any_used(), r.rank() == 0);
    EXPECT_EQ(r.call(Call::kReduceGradients), "");
    for (int64_t b = 0; b < r.flat.buckets(); ++b) {
      for (const Segment& s : r.flat.plan.segments(b, r.rank())) {
        EXPECT_TRUE(at::equal(r.reducer.shard(b).narrow(0, s.offset, s.numel),
                              part_of(r.gradient(s.parameter, 0, 0) / 2, s)));
      }
    }
  });
}

TEST(BackwardPassesTest, HooksAreRemovedWithItAndThoseOfTheUserStay) {
  using torch::autograd::impl::hooks;
  using torch::autograd::impl::post_acc_grad_hooks;
  on_ranks(1, [](Rank& r) {
    r.passes.reset();
    const size_t before = hooks(r.value(0)).size();
    r.make_passes();
    EXPECT_EQ(hooks(r.value(0)).size(), before + 1);
    EXPECT_NE(post_acc_grad_hooks(r.value(0)), nullptr);
    r.passes->remove_hooks();
    r.passes.reset();
    for (size_t p = 0; p < r.domain_of.size(); ++p) {
      ASSERT_EQ(hooks(r.value(p)).size(), before) << p;
      ASSERT_EQ(post_acc_grad_hooks(r.value(p)), nullptr) << p;
    }
    int calls = 0;
    r.value(0).register_hook([&](const at::Tensor&) { ++calls; });
    r.make_passes();
    r.passes->run(r.loss(0));
    r.expect_mean({0});
    EXPECT_EQ(calls, 1);
    r.passes.reset();
    r.loss(1).backward();
    EXPECT_EQ(calls, 2);
    EXPECT_FALSE(r.reducer.any_used());
    for (size_t p = 0; p < r.domain_of.size(); ++p) {
      EXPECT_TRUE(at::equal(r.grad(p), r.gradient(p, 1))) << p;
    }
    // What was in p.grad() before belongs to no pass of the next one.
    r.make_passes();
    r.expect_nothing();
  });
}

TEST(BackwardPassesTest, HooksOfTheUserChangeAGradientBeforeItIsTakenWheneverTheyWereAdded) {
  on_ranks(1, [](Rank& r) {
    r.passes.reset();
    r.value(0).register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    r.make_passes();
    for (const int64_t p : {0, 1}) {
      r.value(p).register_hook([](const at::Tensor& gradient) { return gradient * 4; });
    }
    r.passes->run(r.loss(0));
    EXPECT_EQ(r.call(Call::kReduceGradients), "");
    for (int64_t b = 0; b < r.flat.buckets(); ++b) {
      for (const Segment& s : r.flat.plan.segments(b, 0)) {
        const double factor = s.parameter == 0 ? 8 : s.parameter == 1 ? 4 : 1;
        EXPECT_TRUE(at::equal(r.reducer.shard(b).narrow(0, s.offset, s.numel),
                              part_of(r.gradient(s.parameter, 0) * factor, s)))
            << s.parameter;
      }
    }
  });
}

TEST(BackwardPassesTest, APassOrAScaledLossCountsUntilItIsForgotten) {
  on_ranks(1, [](Rank& r) {
    EXPECT_FALSE(r.passes->any());
    r.passes->run(r.loss(0));
    EXPECT_TRUE(r.passes->any());
    r.passes->forget();
    EXPECT_FALSE(r.passes->any());
    // A scale of 1 leaves the loss as it is.
    const at::Tensor loss = r.loss(1);
    EXPECT_TRUE(r.passes->scale_loss(loss).is_same(loss));
    EXPECT_TRUE(r.passes->any());
    r.passes->forget();
    r.passes->run({r.loss(1)}, {}, false);
    EXPECT_TRUE(r.passes->any());
  });
}

TEST(BackwardPassesTest, EveryLossIsMultipliedByTheScaleThatGradientsAreDividedBy) {
  on_ranks(
      2,
      [](Rank& r) {
        at::Tensor seen;
        r.value(0).register_hook([&](const at::Tensor& gradient) { seen = gradient.clone(); });
        const std::vector<std::function<void()>> ways{
            [&] { r.passes->run(r.loss(0)); }, [&] { r.passes->scale_loss(r.loss(0)).backward(); },
            [&] { r.passes->run({r.loss(0)}, {}, false); },
            [&] { r.passes->run({r.loss(0)}, {at::ones({})}, false); }};
        for (const auto& way : ways) {
          way();
          EXPECT_TRUE(at::equal(seen, r.gradient(0, 0) * 1024));
          r.expect_mean({0});
          r.passes->forget();
        }
      },
      1024);
}

TEST(BackwardPassesTest, OutputsMayHaveGradientsAndKeepTheirGraph) {
  on_ranks(2, [](Rank& r) {
    const Tensors outputs{r.loss_of(0, 0), r.value(1) * 1, r.loss_of(2, 0), r.loss_of(3, 0)};
    const Tensors gradients{at::Tensor(), r.gradient(1, 0), at::ones({})};
    r.passes->run(outputs, gradients, true);
    r.expect_mean({0});
    r.passes->run(outputs, gradients, false);
    r.expect_mean({0});
    EXPECT_NE(error_of([&] { r.passes->run(outputs, gradients, false); }), "");
    EXPECT_TRUE(r.protocol.is_backward_broken());
  });
}

TEST(BackwardPassesTest, UnderNoSyncGradientsStayAndAreSentWithTheNextPass) {
  on_ranks(2, [](Rank& r) {
    *r.protocol.no_sync() = true;
    r.passes->run(r.loss(0));
    r.loss(1).backward();
    EXPECT_EQ(r.reducer.rounds_sent(), 0);
    EXPECT_EQ(r.reducer.unsent_bytes(), 0);
    EXPECT_EQ(r.reducer.used(), std::vector<uint8_t>(r.domain_of.size(), 1));
    for (size_t p = 0; p < r.domain_of.size(); ++p) {
      EXPECT_TRUE(at::equal(r.grad(p), r.gradient(p, 0) + r.gradient(p, 1))) << p;
    }
    *r.protocol.no_sync() = false;
    r.passes->run(r.loss(2));
    EXPECT_EQ(r.reducer.rounds_sent(), 1);
    r.expect_mean({0, 1, 2});
  });
}

TEST(BackwardPassesTest, OnlyGradientsThatAreAccumulatedAreTaken) {
  on_ranks(1, [](Rank& r) {
    const at::Tensor average = at::ones({3, 5});
    r.value(0).mutable_grad() = average;
    r.reducer.mark_averaged(0);
    const Tensors got = torch::autograd::grad({r.loss(0)}, {r.value(0), r.value(1)});
    EXPECT_TRUE(at::equal(got[0], r.gradient(0, 0)));
    EXPECT_FALSE(r.reducer.any_used());
    EXPECT_TRUE(r.grad(0).is_same(average));
    torch::autograd::backward({r.loss(0)}, {at::ones({})}, false, false, {r.value(1)});
    EXPECT_EQ(r.reducer.used(), (std::vector<uint8_t>{0, 1, 0, 0}));
    EXPECT_TRUE(r.grad(0).is_same(average));
  });
}

TEST(BackwardPassesTest, AnAverageIsNotAddedToTheNextGradient) {
  on_ranks(2, [](Rank& r) {
    // The first hook of the user must not replace ours.
    r.value(0).register_hook([](const at::Tensor&) {});
    for (const bool plain : {false, true}) {
      r.value(0).mutable_grad() = at::ones({3, 5});
      r.reducer.mark_averaged(0);
      plain ? r.loss(0).backward() : r.passes->run(r.loss(0));
      r.expect_mean({0});
    }
  });
}

TEST(BackwardPassesTest, APassWaitsForTheParametersOfTheLastStep) {
  on_ranks(2, [](Rank& r) {
    r.gathers.begin();
    for (int64_t b = 0; b < r.flat.buckets(); ++b) {
      const Rows rows = r.arena.rows(b);
      rows.row(r.rank()).fill_(r.rank() + 1);
      r.gathers.start(b, rows);
    }
    r.passes->run(r.loss(0));
    for (int64_t b = 0; b < r.flat.buckets(); ++b) {
      const Rows rows = r.arena.rows(b);
      for (const int rank : {0, 1}) EXPECT_TRUE(rows.row(rank).eq(rank + 1).all().item<bool>());
    }
    r.expect_mean({0});
  });
}

struct OwnHook final : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable&) override {}
};

TEST(BackwardPassesTest, AHookThatTookThePlaceOfOursStays) {
  on_ranks(1, [](Rank& r) {
    auto own = std::make_unique<OwnHook>();
    const auto* const there = own.get();
    torch::autograd::impl::set_post_acc_grad_hooks(r.value(1), std::move(own));
    r.passes.reset();
    EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(r.value(0)), nullptr);
    EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(r.value(1)).get(), there);
  });
}

TEST(BackwardPassesTest, AConstructorThatThrowsLeavesNoHooks) {
  on_ranks(1, [](Rank& r) {
    r.passes.reset();
    // The entry of hooks that users add stays.
    const auto count = [&](int64_t p) { return torch::autograd::impl::hooks(r.value(p)).size(); };
    const std::vector<size_t> before = {count(0), count(1), count(2)};
    r.value(2).requires_grad_(false);
    EXPECT_NE(error_of([&] { r.make_passes(); }), "");
    for (const int64_t p : {0, 1, 2}) {
      EXPECT_EQ(torch::autograd::impl::post_acc_grad_hooks(r.value(p)), nullptr) << p;
      EXPECT_EQ(count(p), before[p]) << p;
    }
  });
}

}  // namespace
}  // namespace zero
