// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/gradient_reducer.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "tests/support/reducer_options.h"
#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;

Tensors zeros(c10::ScalarType dtype) {
  Tensors result;
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{3, 5}, {7}, {1}, {33}}) {
    result.push_back(at::zeros(shape, dtype));
  }
  return result;
}

// Multiples of 1/8 of at most 8, so that all sums are exact in every dtype.
at::Tensor exact(at::IntArrayRef shape, uint64_t seed) {
  return random_tensor(shape, seed).mul_(64).round_().div_(8);
}

struct Options {
  Layout layout = Layout::kContiguous;
  c10::ScalarType dtype = at::kFloat;
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
  bool no_sync_fp32 = false;
  int64_t micro_batches = 0;
};

ReducerOptions of_micro_batches(const Plan& plan, int64_t count) {
  return {make_wire_formats(plan, ZeroOptions().micro_batches(count)), false, count};
}

// One rank with a reducer, whose buckets are as small as they get.
struct Rank {
  explicit Rank(const Group& group_in, const Options& options = {})
      : group(group_in),
        flat(zeros(options.dtype), group.world_size(), {options.layout, 256}),
        data(group.make_communicator("data", Purpose::kData)),
        reducer(flat.plan, flat.table, {{data.get(), nullptr, 0}}, flat.pool,
                options.micro_batches > 0
                    ? of_micro_batches(flat.plan, options.micro_batches)
                    : reducer_options(flat.plan, options.reduce_dtype, options.no_sync_fp32)) {}

  int64_t parameters() const { return static_cast<int64_t>(flat.model.values.size()); }
  at::Tensor& grad(int64_t p) { return flat.model.values[p].mutable_grad(); }
  // What this rank's gradient of pass `pass` is.
  at::Tensor gradient(int64_t p, int pass, int rank) const {
    return exact(flat.model.values[p].sizes(), 100 * rank + 10 * pass + p);
  }
  // As autograd does, without the hook that follows.
  void accumulate(int64_t p, const at::Tensor& gradient) {
    reducer.before_gradient(p);
    const at::Tensor added = gradient.to(flat.model.values[p].scalar_type());
    grad(p) = grad(p).defined() ? grad(p) + added : added.clone();
  }
  void ready(int64_t p, int pass) {
    accumulate(p, gradient(p, pass, group.rank()));
    reducer.gradient_ready(p);
  }
  void backward(int pass) {
    for (int64_t p = parameters() - 1; p >= 0; --p) ready(p, pass);
  }
  // The mean over ranks of the sum of these passes.
  at::Tensor mean(int64_t p, const std::vector<int>& passes) const {
    at::Tensor sum = at::zeros(flat.model.values[p].sizes(), at::kDouble);
    for (int rank = 0; rank < group.world_size(); ++rank) {
      for (const int pass : passes) sum += gradient(p, pass, rank);
    }
    return sum / group.world_size();
  }
  void expect_shards(const std::function<at::Tensor(int64_t p)>& expected) const {
    for (int64_t b = 0; b < flat.buckets(); ++b) {
      for (const Segment& s : flat.plan.segments(b, group.rank())) {
        const at::Tensor got = reducer.shard(b).narrow(0, s.offset, s.numel);
        EXPECT_TRUE(at::allclose(got, part_of(expected(s.parameter), s), 1e-6, 0))
            << "parameter " << s.parameter << " on rank " << group.rank() << " of "
            << group.world_size();
      }
    }
  }
  void expect_mean(const std::vector<int>& passes) const {
    expect_shards([&](int64_t p) { return mean(p, passes); });
  }

  const Group group;
  FlatModel flat;
  const std::unique_ptr<Communicator> data;
  GradientReducer reducer;
};

void on_ranks(int world_size, const std::function<void(Rank&)>& body, const Options& options = {}) {
  run_ranks(world_size, [&](const Group& group) {
    Rank rank(group, options);
    body(rank);
  });
}

TEST(GradientReducerTest, AShardIsTheMeanOverRanksAndGradientsAreFreedAtOnce) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      on_ranks(world_size,
               [](Rank& r) {
                 for (const int step : {0, 1}) {
                   for (int64_t p = r.parameters() - 1; p >= 0; --p) {
                     r.ready(p, step);
                     EXPECT_TRUE(is_marker(r.grad(p)));
                   }
                   EXPECT_EQ(r.reducer.rounds_needed(), 1);
                   EXPECT_EQ(r.reducer.unsent_bytes(), 0);
                   r.reducer.complete(1);
                   r.expect_mean({step});
                   EXPECT_TRUE(r.reducer.any_used());
                   r.reducer.consume();
                   EXPECT_FALSE(r.reducer.any_used());
                   EXPECT_EQ(r.reducer.rounds_needed(), 0);
                   for (int64_t p = 0; p < r.parameters(); ++p) EXPECT_FALSE(r.grad(p).defined());
                 }
               },
               {layout});
    }
  }
}

TEST(GradientReducerTest, ASecondPlainBackwardClosesTheRoundAndAddsUp) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [](Rank& r) {
      for (const int pass : {0, 1, 2}) r.backward(pass);
      EXPECT_EQ(r.reducer.rounds_needed(), 3);
      EXPECT_EQ(r.reducer.rounds_sent(), 2);
      r.reducer.complete(3);
      r.expect_mean({0, 1, 2});
    });
  }
}

TEST(GradientReducerTest, ASecondGradientInAPassWaitsForTheNextRound) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [](Rank& r) {
      r.reducer.begin_pass();
      r.backward(0);
      r.ready(1, 1);
      EXPECT_TRUE(r.grad(1).defined());
      EXPECT_EQ(r.reducer.local_bytes(), 7 * 4);
      EXPECT_EQ(r.reducer.rounds_needed(), 2);
      r.reducer.end_pass(/*kept=*/false);
      EXPECT_EQ(r.reducer.rounds_needed(), 2);
      r.reducer.complete(2);
      EXPECT_EQ(r.reducer.local_bytes(), 0);
      r.expect_shards([&](int64_t p) { return p == 1 ? r.mean(p, {0, 1}) : r.mean(p, {0}); });
    });
  }
}

TEST(GradientReducerTest, WhatAPlainBackwardLeftOpenDoesNotMixWithAPass) {
  on_ranks(2, [](Rank& r) {
    r.ready(3, 0);
    EXPECT_EQ(r.reducer.rounds_sent(), 0);
    r.reducer.begin_pass();
    EXPECT_EQ(r.reducer.rounds_sent(), 1);
    r.backward(1);
    r.reducer.end_pass(/*kept=*/false);
    r.reducer.complete(2);
    r.expect_shards([&](int64_t p) { return p == 3 ? r.mean(p, {0, 1}) : r.mean(p, {1}); });
  });
}

TEST(GradientReducerTest, AKeptGradientStaysLocalUntilARoundIsSent) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [](Rank& r) {
      for (const int pass : {0, 1}) {
        for (int64_t p = 0; p < r.parameters(); ++p) {
          r.accumulate(p, r.gradient(p, pass, r.group.rank()));
          r.reducer.gradient_kept(p);
        }
      }
      EXPECT_EQ(r.reducer.rounds_sent(), 0);
      EXPECT_EQ(r.reducer.unsent_bytes(), 0);
      EXPECT_EQ(r.reducer.local_bytes(), (15 + 7 + 1 + 33) * 4);
      EXPECT_EQ(r.reducer.rounds_needed(), 1);
      r.reducer.verify();
      r.reducer.complete(1);
      r.expect_mean({0, 1});
    });
  }
}

TEST(GradientReducerTest, AResetOfAKeptGradientDropsItAlone) {
  on_ranks(2, [](Rank& r) {
    for (const int64_t p : {1, 2}) {
      r.accumulate(p, r.gradient(p, 0, r.group.rank()));
      r.reducer.gradient_kept(p);
    }
    r.grad(2).reset();
    r.reducer.drop_resets();
    EXPECT_EQ(r.reducer.used(), (std::vector<uint8_t>{0, 1, 0, 0}));
    EXPECT_EQ(r.reducer.rounds_dropped(), 0);
    r.reducer.complete(1);
    r.expect_shards([&](int64_t p) { return p == 1 ? r.mean(p, {0}) : at::zeros({33}); });
  });
}

TEST(GradientReducerTest, AResetOfSomeThatWereSentIsRefused) {
  on_ranks(1, [](Rank& r) {
    r.backward(0);
    r.grad(1).reset();
    const std::vector<std::string> words{
        "parameter value1", "expected the gradients of the 4 parameters that were sent",
        "got 1 that were reset", "zero_grad() of the ZeroOptimizer"};
    expect_words(error_of([&] { r.reducer.drop_resets(); }), words);
    expect_words(error_of([&] { r.reducer.before_gradient(1); }), words);
    r.reducer.discard();
    r.reducer.drop_resets();
  });
}

TEST(GradientReducerTest, AGradientOfAnotherShapeThatWasPutThereIsNotSent) {
  on_ranks(1, [](Rank& r) {
    // The strides of the parameter and fewer rows, so that nothing but the shape shows it.
    r.grad(0) = at::ones({1, 5});
    const std::vector<std::string> words{"gradient of value0", "expected shape [3, 5]", "[1, 5]"};
    expect_words(error_of([&] { r.reducer.verify(); }), words);
    expect_words(error_of([&] { r.reducer.end_pass(/*kept=*/false); }), words);
    r.reducer.discard();
    r.reducer.complete(1);
    r.expect_shards([&](int64_t) { return at::zeros({33}); });
  });
}

TEST(GradientReducerTest, ARankThatIsBehindSendsZeros) {
  for (const int world_size : {2, 3, 4}) {
    on_ranks(world_size, [](Rank& r) {
      if (r.group.rank() == 0) {
        r.backward(0);
        r.backward(1);
      }
      EXPECT_EQ(r.reducer.rounds_needed(), r.group.rank() == 0 ? 2 : 0);
      r.reducer.complete(2);
      r.expect_shards([&](int64_t p) {
        return (r.gradient(p, 0, 0) + r.gradient(p, 1, 0)) / r.group.world_size();
      });
      EXPECT_EQ(r.reducer.any_used(), r.group.rank() == 0);
    });
  }
}

TEST(GradientReducerTest, AnAverageIsNeverSentAndAChangeOfItIsNoticed) {
  on_ranks(2, [](Rank& r) {
    r.grad(0) = at::ones({3, 5});
    r.reducer.mark_averaged(0);
    EXPECT_EQ(r.reducer.rounds_needed(), 0);
    EXPECT_EQ(r.reducer.local_bytes(), 0);
    r.reducer.verify();
    r.grad(0).add_(1);
    expect_words(error_of([&] { r.reducer.verify(); }),
                 {"parameter value0", "averaged gradient", "to be only read, got a change"});
    // The next gradient replaces it.
    r.grad(0) = at::ones({3, 5});
    r.reducer.mark_averaged(0);
    r.reducer.before_gradient(0);
    EXPECT_FALSE(r.grad(0).defined());
    r.reducer.verify();
    r.backward(0);
    r.reducer.complete(1);
    r.expect_mean({0});
  });
}

TEST(GradientReducerTest, DiscardForgetsWhatThisRankHasNotSent) {
  on_ranks(2, [](Rank& r) {
    r.accumulate(3, r.gradient(3, 0, r.group.rank()));
    r.reducer.gradient_kept(3);
    if (r.group.rank() == 1) r.reducer.discard();
    EXPECT_EQ(r.reducer.rounds_needed(), r.group.rank() == 1 ? 0 : 1);
    r.reducer.complete(1);
    r.expect_shards([&](int64_t p) { return p == 3 ? r.gradient(p, 0, 0) / 2 : at::zeros({33}); });
  });
}

TEST(GradientReducerTest, BucketsWithAnUnusedParameterGoLast) {
  on_ranks(1, [](Rank& r) {
    // Bucket 0 holds parameters 3 and 2, bucket 1 the others.
    ASSERT_EQ(r.flat.plan.parameter_buckets[3], std::vector<int64_t>{0});
    ASSERT_EQ(r.flat.plan.parameter_buckets[2], std::vector<int64_t>{0});
    ASSERT_EQ(r.flat.plan.parameter_buckets[0], std::vector<int64_t>{1});
    for (int64_t p = 2; p >= 0; --p) r.ready(p, 0);
    EXPECT_EQ(r.reducer.unsent_bytes(), (1 + 7 + 15) * 4);
    r.reducer.complete(1);
    r.reducer.consume();
    r.reducer.expect_unused({1, 1, 1, 0});
    for (int64_t p = 2; p >= 0; --p) r.ready(p, 0);
    EXPECT_EQ(r.reducer.unsent_bytes(), 1 * 4);
    r.reducer.complete(1);
    r.expect_shards([&](int64_t p) { return p == 3 ? at::zeros({33}) : r.mean(p, {0}); });
  });
}

// On two ranks, which send one node of the tree each, or up to two.
TEST(GradientReducerTest, TheBytesOfMicroBatchesAreCountedUntilTheyAreSent) {
  for (const int64_t nodes : {1, 2}) {
    Options options;
    options.micro_batches = nodes == 1 ? 4 : 6;
    const auto body = [&](Rank& r) {
      const int own = static_cast<int>(r.reducer.micro_batches()->own());
      std::vector<int> passes;
      for (int pass = 0; pass < own - 1; ++pass) {
        ASSERT_TRUE(r.reducer.keeps_gradients());
        for (int64_t p = 0; p < r.parameters(); ++p) {
          r.accumulate(p, r.gradient(p, pass, r.group.rank()));
          r.reducer.gradient_kept(p);
        }
        r.reducer.end_pass(/*kept=*/true);
        passes.push_back(pass);
      }
      passes.push_back(own - 1);
      ASSERT_FALSE(r.reducer.keeps_gradients());
      // The first two of rank 0 are a node, those of rank 1 are not.
      const int64_t sums = nodes == 1 ? 1 : 1 + r.group.rank();
      EXPECT_EQ(r.reducer.local_bytes(), sums * (15 + 7 + 1 + 33) * 4);
      r.reducer.begin_pass();
      for (int64_t p = 2; p >= 0; --p) r.ready(p, own - 1);
      EXPECT_EQ(r.reducer.local_bytes(), sums * 33 * 4);
      // Bucket 1 is full, and has the padding of its rows where they are not sent as they are.
      const int64_t full = nodes == 1 ? 7 + 15 : r.flat.plan.buckets[1].rows.total();
      EXPECT_EQ(r.reducer.unsent_bytes(), nodes * (1 + full) * 4);
      r.ready(3, own - 1);
      EXPECT_EQ(r.reducer.unsent_bytes(), 0);
      r.reducer.end_pass(/*kept=*/false);
      EXPECT_EQ(r.reducer.local_bytes(), 0);
      EXPECT_EQ(r.reducer.rounds_needed(), 1);
      r.reducer.complete(1);
      r.expect_mean(passes);
    };
    on_ranks(2, body, options);
  }
}

TEST(GradientReducerTest, AnErrorNamesTheBucketThatWasNotReduced) {
  on_ranks(2, [](Rank& r) {
    r.reducer.expect_unused({1, 1, 1, 0});  // bucket 1 is sent first
    if (r.group.rank() == 1) return r.data->abort("this rank ends");
    const std::string error = error_of([&] {
      for (int64_t p = 2; p >= 0; --p) r.ready(p, 0);
      r.reducer.complete(1);
    });
    expect_words(error, {"gradient bucket 1", "rank 0"});
  });
}

TEST(GradientReducerTest, GradientsThatWerePutThereByHandAreClaimed) {
  on_ranks(2, [](Rank& r) {
    r.grad(1) = r.gradient(1, 0, r.group.rank());
    EXPECT_FALSE(r.reducer.any_used());
    r.reducer.claim_gradients();
    EXPECT_EQ(r.reducer.used(), (std::vector<uint8_t>{0, 1, 0, 0}));
    r.reducer.complete(r.reducer.rounds_needed());
    r.expect_shards([&](int64_t p) { return p == 1 ? r.mean(p, {0}) : at::zeros({33}); });
  });
}

TEST(GradientReducerTest, AGradientTakenOnTheWayHasTheBitsOfOneThatWasAccumulated) {
  on_ranks(2,
           [](Rank& r) {
             const auto inexact = [&](int64_t p, int pass) {
               return random_tensor(r.flat.model.values[p].sizes(), 7 * pass + p).to(at::kBFloat16);
             };
             std::vector<at::Tensor> shards;
             for (const bool taken : {false, true}) {
               for (int64_t p = r.parameters() - 1; p >= 0; --p) {
                 r.accumulate(p, inexact(p, 0));
                 if (taken) {
                   EXPECT_TRUE(r.reducer.take_gradient(p, inexact(p, 1)));
                 } else {
                   r.accumulate(p, inexact(p, 1));
                   r.reducer.gradient_ready(p);
                 }
                 EXPECT_TRUE(is_marker(r.grad(p)));
               }
               // Its place in the round is taken.
               EXPECT_FALSE(r.reducer.take_gradient(0, inexact(0, 2)));
               r.reducer.complete(1);
               for (int64_t b = 0; b < r.flat.buckets(); ++b) {
                 for (const Segment& s : r.flat.plan.segments(b, r.group.rank())) {
                   shards.push_back(r.reducer.shard(b).narrow(0, s.offset, s.numel).clone());
                 }
               }
               r.reducer.consume();
             }
             const size_t half = shards.size() / 2;
             for (size_t i = 0; i < half; ++i) EXPECT_TRUE(at::equal(shards[i], shards[half + i]));
           },
           {.dtype = at::kBFloat16});
}

// Data groups of two ranks, `copies` of them, and two groups of replicas across them.
void expect_sum_over_replicas(const Group& group, int copies) {
  const int world = 2 * copies;
  const int row = group.rank() % 2;
  std::vector<int> ranks_across;
  for (int rank = row; rank < world; rank += 2) ranks_across.push_back(rank);
  const int first = group.rank() - row;
  const Group within = group.subgroup({first, first + 1}, "within");
  const Group across = group.subgroup(ranks_across, "across");
  const auto data = within.make_communicator("data", Purpose::kData);
  const auto replicas = across.make_communicator("replicas", Purpose::kData);
  FlatModel flat(zeros(at::kFloat), 2, {Layout::kContiguous, 256});
  GradientReducer reducer(flat.plan, flat.table, {{data.get(), replicas.get(), 0}}, flat.pool,
                          reducer_options(flat.plan));
  at::Tensor expected = at::zeros({33});
  for (const int round : {1, 2, 3}) {
    flat.model.values[3].mutable_grad() = exact({33}, 10 * group.rank() + round);
    reducer.gradient_ready(3);
    reducer.complete(round);
    for (int r = 0; r < world; ++r) expected += exact({33}, 10 * r + round) / world;
    for (int64_t b = 0; b < flat.buckets(); ++b) {
      for (const Segment& s : flat.plan.segments(b, within.rank())) {
        if (s.parameter != 3) continue;
        EXPECT_TRUE(at::allclose(reducer.shard(b).narrow(0, s.offset, s.numel),
                                 part_of(expected, s), 1e-6, 0))
            << "round " << round << " on rank " << group.rank() << " of " << world;
      }
    }
  }
}

TEST(GradientReducerTest, RoundsThatAreCompletedApartAddUpOverReplicas) {
  for (const int copies : {1, 2}) {
    run_ranks(2 * copies, [&](const Group& group) { expect_sum_over_replicas(group, copies); });
  }
}

}  // namespace
}  // namespace zero
