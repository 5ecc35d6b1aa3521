// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeroOptions::ema beside plain torch, whose average is kept by hand: its values, its guard, and
// where it goes when ranks, parameters and checkpoints change.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bookkeeping/memory.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/state_snapshot.h"
#include "tests/support/training.h"
#include "zero/checkpoint.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr double kDecay = 0.8;

std::vector<at::Tensor> initial_values(c10::ScalarType dtype = at::kFloat) {
  return {random_tensor({5, 7}, 1).to(dtype), random_tensor({41}, 2).to(dtype),
          random_tensor({3, 4}, 3).to(dtype)};
}

// Those of a model with a parameter that no step uses.
std::vector<at::Tensor> with_unused() {
  std::vector<at::Tensor> result = initial_values();
  result.push_back(random_tensor({6}, 4));
  return result;
}

// The second parameter has one in every other step, the same on all ranks.
std::vector<at::Tensor> gradients(int rank, int step) {
  std::vector<at::Tensor> result;
  const auto seed = static_cast<uint64_t>(100 * step + 10 * rank);
  for (const at::Tensor& value : initial_values()) {
    result.push_back(random_tensor(value.sizes(), seed + result.size()));
  }
  if (step % 2 == 1) result[1] = at::Tensor();
  return result;
}

std::unique_ptr<torch::optim::Optimizer> inner_of(Inner inner,
                                                  const std::vector<at::Tensor>& parameters) {
  using namespace torch::optim;
  if (inner == Inner::kAdamW) return std::make_unique<AdamW>(parameters, 0.05);
  if (inner == Inner::kRmsprop) return std::make_unique<RMSprop>(parameters, 0.02);
  return std::make_unique<SGD>(parameters, SGDOptions(0.3).momentum(0.9));
}

ZeroOptions with_ema() { return ZeroOptions().bucket_bytes(128).ema(EmaOptions().decay(kDecay)); }

std::vector<at::Tensor> values_of(const GivenGradients& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : model.values) result.push_back(p.detach().clone());
  return result;
}

std::vector<at::Tensor> masters_of(ZeroOptimizer& optimizer, const GivenGradients& model) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : model.values) result.push_back(optimizer.master(p));
  return result;
}

// What the model computes with under the guard.
std::vector<at::Tensor> averages_of(ZeroOptimizer& optimizer, const GivenGradients& model) {
  const auto guard = optimizer.use_ema();
  return values_of(model);
}

// The same average, kept by hand over full masters.
struct ByHand {
  explicit ByHand(std::vector<at::Tensor> masters) : average(std::move(masters)) {}
  void follow(const std::vector<at::Tensor>& masters) {
    ++steps;
    const double t = static_cast<double>(steps);
    const double weight = 1 - std::min(kDecay, (1 + t) / (10 + t));
    for (size_t i = 0; i < average.size(); ++i) {
      average[i] = average[i] + (masters[i] - average[i]) * weight;
    }
  }
  std::vector<at::Tensor> in(c10::ScalarType dtype) const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& a : average) result.push_back(a.to(dtype));
    return result;
  }

  std::vector<at::Tensor> average;
  int64_t steps = 0;
};

void step(ZeroOptimizer& optimizer, const GivenGradients& model, int rank, int number) {
  optimizer.backward(model.loss(gradients(rank, number)));
  optimizer.step();
}

class EmaAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, EmaAt, ::testing::Values(1, 2, 3, 4));

struct Setting {
  c10::ScalarType dtype;
  Inner inner;
  bool fused;
  int64_t stage;
  Layout layout;
  bool static_graph;
  bool overlap_gather;
};
constexpr Setting kSettings[] = {
    {at::kFloat, Inner::kAdamW, true, 2, Layout::kContiguous, false, false},
    {at::kFloat, Inner::kSgdMomentum, true, 1, Layout::kPerParameter, false, true},
    {at::kFloat, Inner::kRmsprop, true, 2, Layout::kWholeParameters, false, false},
    {at::kFloat, Inner::kSgdMomentum, false, 2, Layout::kContiguous, false, true},
    {at::kBFloat16, Inner::kSgdMomentum, true, 2, Layout::kContiguous, true, false},
    {at::kBFloat16, Inner::kAdamW, true, 1, Layout::kWholeParameters, false, false},
};

TEST_P(EmaAt, IsTheAverageOfThePlainRunAndTakenBackInEveryBit) {
  const int world_size = GetParam();
  for (const Setting& s : kSettings) {
    // With static_graph every parameter has a gradient.
    const auto used = [&](int rank, int n) { return gradients(rank, s.static_graph ? 2 * n : n); };
    run_ranks(world_size, [&](const Group& group) {
      GivenGradients model(initial_values(s.dtype)), plain_model(initial_values());
      if (s.dtype != at::kFloat) {
        for (size_t i = 0; i < plain_model.values.size(); ++i) {
          plain_model.values[i].set_data(model.values[i].detach().to(at::kFloat));
        }
      }
      ZeroOptimizer optimizer(model, inner_of(s.inner, model.parameters()), group,
                              with_ema()
                                  .stage(s.stage)
                                  .layout(s.layout)
                                  .fused(s.fused)
                                  .static_graph(s.static_graph)
                                  .overlap_gather(s.overlap_gather));
      const auto plain = inner_of(s.inner, plain_model.parameters());
      ByHand of_masters(masters_of(optimizer, model)), of_plain(values_of(plain_model));
      for (int n = 0; n < 6; ++n) {
        optimizer.backward(model.loss(used(group.rank(), n)));
        optimizer.step();
        plain->zero_grad();
        at::Tensor sum = at::zeros({});
        for (int r = 0; r < world_size; ++r) {
          auto given = used(r, n);
          for (at::Tensor& g : given) {
            if (g.defined()) g = g.to(s.dtype).to(at::kFloat);
          }
          sum = sum + plain_model.loss(given) / world_size;
        }
        sum.backward();
        plain->step();
        of_masters.follow(masters_of(optimizer, model));
        of_plain.follow(values_of(plain_model));
        const auto before = everything(model, optimizer);
        const auto average = averages_of(optimizer, model);
        EXPECT_TRUE(same_bits(average, of_masters.in(s.dtype))) << n;
        for (size_t i = 0; i < average.size(); ++i) {
          EXPECT_TRUE(at::allclose(average[i].to(at::kFloat),
                                   of_plain.average[i].to(s.dtype).to(at::kFloat), 1e-2 / 64,
                                   s.dtype == at::kFloat ? 2e-6 : 0.01))
              << n << " " << i;
        }
        EXPECT_FALSE(same_bits(average, values_of(model))) << n;
        EXPECT_TRUE(same_bits(everything(model, optimizer), before)) << n;
      }
      optimizer.check_replicas();
    });
  }
}

TEST_P(EmaAt, TakesAFloatForEachElementOfTheShard) {
  run_ranks(GetParam(), [&](const Group& group) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      GivenGradients model(initial_values(dtype)), other(initial_values(dtype));
      ZeroOptimizer optimizer(model, inner_of(Inner::kSgd, model.parameters()), group, with_ema());
      ZeroOptimizer without(other, inner_of(Inner::kSgd, other.parameters()), group,
                            ZeroOptions().bucket_bytes(128));
      step(optimizer, model, group.rank(), 0);
      step(without, other, group.rank(), 0);
      MemoryOptions expected;
      expected.ema = true;
      const int64_t bytes = expected_memory(optimizer.plan(), group.rank(), expected).ema;
      EXPECT_GT(bytes, 0);
      EXPECT_EQ(optimizer.memory().ema, bytes);
      EXPECT_EQ(optimizer.memory().total() - without.memory().total(), bytes);
      EXPECT_EQ(without.memory().ema, 0);
      // fp32 masters are working rows, and set aside meanwhile.
      const auto guard = optimizer.use_ema();
      EXPECT_EQ(optimizer.memory().ema, dtype == at::kFloat ? 2 * bytes : bytes);
    }
  });
}

TEST(EmaTrainingTest, WhileTheGuardLivesNothingTrains) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial_values());
    ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group, with_ema());
    step(optimizer, model, group.rank(), 0);
    const auto before = everything(model, optimizer);
    const auto average = averages_of(optimizer, model);
    {
      auto guard = optimizer.use_ema();
      const std::vector<std::string> words{"expected the guard of use_ema() to have ended"};
      expect_words(error_of([&] { optimizer.step(); }), words);
      expect_words(error_of([&] { optimizer.save_checkpoint(testing::TempDir() + "never"); }),
                   words);
      expect_words(error_of([&] { optimizer.clip_grad_norm_(1.0); }), words);
      expect_words(error_of([&] { optimizer.use_ema().end(); }), words);
      expect_words(error_of([&] { optimizer.refresh_master_parameters(); }), words);
      // One rank alone: the others learn it.
      if (group.rank() == 1) {
        expect_words(error_of([&] { optimizer.backward(model.loss(gradients(1, 2))); }), words);
      }
      expect_words(error_of([&] { optimizer.grad_norm(); }), words);
      // Also by a plain pass.
      expect_words(error_of([&] { model.loss(gradients(group.rank(), 2)).backward(); }), words);
      expect_words(error_of([&] { optimizer.grad_norm(); }), words);
      for (const at::Tensor& p : model.values) EXPECT_FALSE(p.grad().defined());
      EXPECT_TRUE(same_bits(values_of(model), average));
      // Edits are lost.
      model.values[0].detach().fill_(7);
      model.values[1].set_data(at::ones_like(model.values[1]));
      guard.end();
      guard.end();  // twice does nothing
    }
    EXPECT_TRUE(same_bits(everything(model, optimizer), before));
    optimizer.zero_grad();
    EXPECT_TRUE(same_bits(averages_of(optimizer, model), average));
    step(optimizer, model, group.rank(), 2);
    optimizer.check_replicas();
  });
}

// Else the guard's end would take them for edits under it.
TEST(EmaTrainingTest, WhatWasLoadedBeforeTheGuardIsNotLost) {
  for (const int world_size : {1, 2}) {
    for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(world_size, [&](const Group& group) {
        GivenGradients model(initial_values(dtype));
        ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group,
                                with_ema());
        step(optimizer, model, group.rank(), 0);
        const at::Tensor& loaded = model.values[1];
        if (group.rank() == 0) loaded.set_data(at::full_like(loaded, 3));
        expect_words(error_of([&] { optimizer.use_ema().end(); }),
                     {"expected the storage the last step left", "refresh_master_parameters()"});
        optimizer.refresh_master_parameters();
        optimizer.use_ema().end();
        EXPECT_TRUE(loaded.eq(3).all().item<bool>());
        // For a validation without graphs.
        loaded.requires_grad_(false);
        optimizer.use_ema().end();
        loaded.requires_grad_(true);
        step(optimizer, model, group.rank(), 2);
      });
    }
  }
}

TEST(EmaTrainingTest, AnExceptionTakesItBack) {
  run_ranks(3, [&](const Group& group) {
    GivenGradients model(initial_values(at::kBFloat16));
    ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group, with_ema());
    step(optimizer, model, group.rank(), 0);
    const auto before = everything(model, optimizer);
    try {
      const auto guard = optimizer.use_ema();
      EXPECT_FALSE(same_bits(everything(model, optimizer), before));
      if (group.rank() == 1) throw std::runtime_error("validation");
    } catch (const std::runtime_error&) {
    }
    EXPECT_TRUE(same_bits(everything(model, optimizer), before));
    step(optimizer, model, group.rank(), 2);
  });
}

// On one rank, and on all.
TEST(EmaTrainingTest, ARefusedBackwardPassEndsItsScopeAsAnotherErrorDoes) {
  for (const bool all : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      GivenGradients model(initial_values());
      ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group,
                              with_ema());
      step(optimizer, model, group.rank(), 0);
      const auto before = everything(model, optimizer);
      const auto validate = [&] {
        const auto guard = optimizer.use_ema();
        if (all || group.rank() == 1) optimizer.backward(model.loss(gradients(group.rank(), 2)));
      };
      if (all || group.rank() == 1) {
        expect_words(error_of(validate), {"expected the guard of use_ema() to have ended"});
      } else {
        validate();
      }
      EXPECT_TRUE(same_bits(everything(model, optimizer), before));
      // What was misused is said to all ranks by their next call.
      expect_words(error_of([&] { optimizer.grad_norm(); }), {"use_ema()"});
      optimizer.zero_grad();
      step(optimizer, model, group.rank(), 2);
      optimizer.check_replicas();
    });
  }
}

TEST(EmaTrainingTest, AGuardThatEndedEndsNoOther) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial_values());
    ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group, with_ema());
    step(optimizer, model, group.rank(), 0);
    const auto average = averages_of(optimizer, model);
    std::optional<ZeroOptimizer::EmaGuard> first(optimizer.use_ema());
    first->end();
    auto second = optimizer.use_ema();
    first.reset();
    EXPECT_TRUE(same_bits(values_of(model), average));
    auto moved = std::move(second);
    second.end();  // NOLINT(bugprone-use-after-move): it has none any more
    EXPECT_TRUE(same_bits(values_of(model), average));
    moved.end();
    EXPECT_FALSE(same_bits(values_of(model), average));
  });
}

// The copies of a shard are made of the masters, whenever a thread makes them.
TEST(EmaTrainingTest, ItComesDirectlyBehindAnAsynchronousSave) {
  const std::string folder = testing::TempDir() + "/ema_async";
  std::filesystem::remove_all(folder);
  run_ranks(2, [&](const Group& group) {
    GivenGradients model({random_tensor({300, 1000}, 1)});
    const auto make = [&](GivenGradients& of) {
      return std::make_unique<ZeroOptimizer>(of, inner_of(Inner::kAdamW, of.parameters()), group,
                                             with_ema().bucket_bytes(1 << 16));
    };
    const auto optimizer = make(model);
    optimizer->backward(model.loss({random_tensor({300, 1000}, 2)}));
    optimizer->step();
    const auto before = values_of(model);
    const auto save = optimizer->save_checkpoint_async(folder);
    const auto average = averages_of(*optimizer, model);
    save->finish();
    GivenGradients other({at::zeros({300, 1000})});
    const auto loaded = make(other);
    loaded->load_checkpoint(folder);
    EXPECT_TRUE(same_bits(values_of(other), before));
    EXPECT_TRUE(same_bits(averages_of(*loaded, other), average));
  });
}

// A rank that goes on while another one's guard ends may train with other parameters than it.
TEST(EmaTrainingTest, AGuardThatCannotTakeItBackClosesTheCommunication) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial_values());
    ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group, with_ema());
    step(optimizer, model, group.rank(), 0);
    {
      const auto guard = optimizer.use_ema();
      if (group.rank() == 0) error_of([&] { optimizer.step(); });
    }
    expect_words(error_of([&] { optimizer.grad_norm(); }), {"use_ema()"});
  });
}

TEST(EmaTrainingTest, UnusableArgumentsThrowOnAllRanks) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial_values());
    const auto make = [&](const ZeroOptions& options) {
      return ZeroOptimizer(model, inner_of(Inner::kSgd, model.parameters()), group, options);
    };
    for (const double decay : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()}) {
      expect_words(error_of([&] { make(ZeroOptions().ema(EmaOptions().decay(decay))); }),
                   {"ema: expected a decay from 0 on and below 1"});
    }
    {
      ZeroOptimizer optimizer(model, inner_of(Inner::kSgd, model.parameters()), group);
      expect_words(error_of([&] { optimizer.use_ema().end(); }),
                   {"expected an optimizer with", "ema"});
    }
    ZeroOptimizer optimizer(model, inner_of(Inner::kSgd, model.parameters()), group, with_ema());
    optimizer.backward(model.loss(gradients(group.rank(), 0)));
    expect_words(error_of([&] { optimizer.use_ema().end(); }),
                 {"no gradients since the last step"});
    optimizer.step();
    optimizer.use_ema().end();
  });
}

TEST(EmaTrainingTest, LoadedWeightsBeginItAgainBeforeTheFirstStep) {
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial_values());
    ZeroOptimizer optimizer(model, inner_of(Inner::kSgd, model.parameters()), group, with_ema());
    for (const at::Tensor& p : model.values) p.detach().fill_(3);
    optimizer.refresh_master_parameters();
    EXPECT_TRUE(same_bits(averages_of(optimizer, model), values_of(model)));
    step(optimizer, model, group.rank(), 0);
    const auto before = averages_of(optimizer, model);
    for (const at::Tensor& p : model.values) p.detach().fill_(5);
    optimizer.refresh_master_parameters();
    EXPECT_TRUE(same_bits(averages_of(optimizer, model), before));
  });
}

struct Saved {
  std::vector<at::Tensor> average, values;
};

// Three steps on `world_size` ranks, saved to `folder`.
Saved save(int world_size, const std::string& folder, const ZeroOptions& options) {
  Saved saved;
  std::filesystem::remove_all(folder);
  run_ranks(world_size, [&](const Group& group) {
    GivenGradients model(with_unused());
    ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group, options);
    for (int n = 0; n < 3; ++n) step(optimizer, model, group.rank(), n);
    optimizer.save_checkpoint(folder);
    if (group.rank() != 0 && !options.ema()) return;
    const auto average = options.ema() ? averages_of(optimizer, model) : values_of(model);
    if (group.rank() == 0) saved = {average, values_of(model)};
  });
  return saved;
}

TEST(EmaTrainingTest, AnyNumberOfRanksFindsItInACheckpoint) {
  const std::string folder = testing::TempDir() + "/ema";
  for (const int saving : {1, 2, 3}) {
    const Saved saved = save(saving, folder, with_ema());
    EXPECT_TRUE(describe_checkpoint(folder).ema);
    verify_checkpoint(folder);
    for (const int loading : {saving, saving + 1, 5 - saving}) {
      run_ranks(loading, [&](const Group& group) {
        GivenGradients model(with_unused());
        ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group,
                                with_ema().layout(Layout::kPerParameter).bucket_bytes(64));
        const LoadReport report = optimizer.load_checkpoint(folder);
        EXPECT_TRUE(report.differences.empty());
        EXPECT_TRUE(same_bits(averages_of(optimizer, model), saved.average));
        EXPECT_TRUE(same_bits(values_of(model), saved.values));
        // The warm-up goes on where it was.
        ByHand by_hand(saved.average);
        by_hand.steps = 3;
        step(optimizer, model, 0, 3);
        by_hand.follow(masters_of(optimizer, model));
        EXPECT_TRUE(same_bits(averages_of(optimizer, model), by_hand.average));
      });
    }
  }
}

TEST(EmaTrainingTest, ItIsAddedToARunAndDroppedFromOne) {
  const std::string folder = testing::TempDir() + "/ema_added";
  const auto load = [&](const ZeroOptions& options, const std::string& word,
                        const std::vector<at::Tensor>& expected) {
    run_ranks(2, [&](const Group& group) {
      GivenGradients model(with_unused());
      ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group, options);
      step(optimizer, model, group.rank(), 9);
      const LoadReport report = optimizer.load_checkpoint(folder);
      ASSERT_EQ(report.differences.size(), 1u);
      expect_words(report.differences[0], {"average of parameters", word});
      const auto now = options.ema() ? averages_of(optimizer, model) : values_of(model);
      EXPECT_TRUE(same_bits(now, expected));
      step(optimizer, model, group.rank(), 4);
    });
  };
  Saved saved = save(3, folder, ZeroOptions().bucket_bytes(128));
  EXPECT_FALSE(describe_checkpoint(folder).ema);
  load(with_ema(), "none in the checkpoint", saved.values);
  expect_words(error_of([&] { export_model(folder, folder + ".pt", ExportOptions().ema(true)); }),
               {"expected averages"});
  saved = save(3, folder, with_ema());
  load(ZeroOptions().bucket_bytes(128), "none here", saved.values);
}

TEST(EmaTrainingTest, AnExportHasItWhereThatIsAskedFor) {
  const std::string folder = testing::TempDir() + "/ema_export";
  const Saved saved = save(2, folder, with_ema());
  for (const bool ema : {false, true}) {
    const std::string path = folder + ".safetensors";
    std::filesystem::remove(path);
    export_model(folder, path, ExportOptions().ema(ema));
    GivenGradients model(with_unused());
    load_weights(model, path);
    EXPECT_TRUE(same_bits(values_of(model), ema ? saved.average : saved.values)) << ema;
  }
}

TEST_P(EmaAt, GoesAlongWhereParametersChange) {
  run_ranks(GetParam(), [&](const Group& group) {
    GivenGradients model(initial_values());
    ZeroOptimizer optimizer(model, inner_of(Inner::kAdamW, model.parameters()), group, with_ema());
    for (int n = 0; n < 3; ++n) step(optimizer, model, group.rank(), n);
    auto average = averages_of(optimizer, model);
    optimizer.freeze({model.values[1]});
    auto now = averages_of(optimizer, model);
    EXPECT_TRUE(same_bits({now[0], now[2]}, {average[0], average[2]}));
    EXPECT_TRUE(at::equal(now[1], model.values[1]));
    // It begins anew as the master is.
    optimizer.unfreeze({model.values[1]});
    now = averages_of(optimizer, model);
    EXPECT_TRUE(same_bits({now[0], now[2]}, {average[0], average[2]}));
    EXPECT_TRUE(at::equal(now[1], model.values[1]));
    // Rows that stay keep theirs, and a new one begins as its master.
    const at::Tensor rows = at::tensor(std::vector<int64_t>{4, 0, -1, 2, 2});
    at::Tensor values = model.values[0].detach().index_select(0, rows.clamp_min(0)).clone();
    values[2].fill_(0.5);
    optimizer.resize_rows({{model.values[0], rows, values}});
    const auto resized = averages_of(optimizer, model);
    at::Tensor expected = now[0].index_select(0, rows.clamp_min(0)).clone();
    expected[2].fill_(0.5);
    EXPECT_TRUE(same_bits({resized[0], resized[2]}, {expected, average[2]}));
    ByHand by_hand(resized);
    by_hand.steps = 3;
    optimizer.backward(at::sum(model.values[0] * model.values[0]));
    optimizer.step();
    by_hand.follow(masters_of(optimizer, model));
    EXPECT_TRUE(same_bits(averages_of(optimizer, model), by_hand.average));
  });
}

}  // namespace
}  // namespace zero
