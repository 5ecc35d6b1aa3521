// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// freeze(), unfreeze() and add_param_group() against plain torch, where a parameter leaves and
// enters an optimizer with its state, after every step. Gradients are small multiples of 1/8, so
// that their means are exact for every number of ranks.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <latch>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/run_ranks.h"
#include "zero/base/message_probe.h"
#include "zero/checkpoint.h"
#include "zero/combined_optimizer.h"
#include "zero/lr_schedule.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Values = std::vector<at::Tensor>;

enum class Inner { kSgdMomentum, kAdamW };

Values initial(c10::ScalarType dtype) {
  Values result;
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{7, 33}, {5}, {64}, {3, 20}, {100}, {11}, {1}}) {
    int64_t numel = 1;
    for (const int64_t size : sizes) numel *= size;
    const auto k = static_cast<int64_t>(result.size());
    const at::Tensor line = at::arange(numel, at::kFloat).add_(static_cast<double>(k));
    result.push_back(line.sin_().reshape(sizes).to(dtype));
  }
  return result;
}

// Ranks have different gradients; their mean is that of one rank alone.
Values gradients(const Values& values, int step, int rank = 0, int world_size = 1) {
  const double part = 1.0 + 0.25 * (2 * rank - (world_size - 1));
  Values result;
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor line = at::arange(values[i].numel(), at::kFloat);
    const at::Tensor whole = line.add_(static_cast<double>(step) * 3 + i).remainder(13).sub_(6);
    result.push_back(whole.mul(0.125 * part).reshape(values[i].sizes()));
  }
  return result;
}

// The first two parameters of a list are one group, the next two another. The rest is in none.
template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> two_groups(const Values& values, const Options& first,
                                                    const Options& second) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Values{values[0], values[1]}, std::make_unique<Options>(first));
  groups.emplace_back(Values{values[2], values[3]}, std::make_unique<Options>(second));
  return std::make_unique<Optimizer>(groups, first);
}

std::unique_ptr<torch::optim::Optimizer> make(Inner inner, const Values& values) {
  if (inner == Inner::kAdamW) {
    return two_groups<AdamW>(values, AdamWOptions(0.05), AdamWOptions(0.02).weight_decay(0.1));
  }
  return two_groups<SGD>(values, SGDOptions(0.05).momentum(0.9), SGDOptions(0.02).momentum(0.5));
}

OptimizerParamGroup third_group(Inner inner, const Values& parameters) {
  if (inner == Inner::kAdamW) return {parameters, std::make_unique<AdamWOptions>(0.01)};
  return {parameters, std::make_unique<SGDOptions>(SGDOptions(0.01).momentum(0.7))};
}

// What happens before step `step`, in both worlds. Parameters 1 and 2 leave; 1 is back in the other
// group; 2, and 4, which was never there, have a group of their own.
constexpr int kSteps = 12;
constexpr int kFreeze = 3;
constexpr int kUnfreeze = 6;
constexpr int kAdd = 9;

using Trajectory = std::vector<Values>;

Values copies(const Values& values) {
  Values result;
  for (const at::Tensor& p : values) result.push_back(p.detach().clone());
  return result;
}

void leave(torch::optim::Optimizer& optimizer, size_t group, size_t place) {
  auto& list = optimizer.param_groups()[group].params();
  list[place].requires_grad_(false);
  list[place].mutable_grad().reset();
  optimizer.state().erase(list[place].unsafeGetTensorImpl());
  list.erase(list.begin() + static_cast<int64_t>(place));
}

Trajectory train_plain(Inner inner, c10::ScalarType dtype) {
  GivenGradients model(initial(dtype));
  const auto& v = model.values;
  v[4].requires_grad_(false);
  const auto optimizer = make(inner, v);
  Trajectory result;
  for (int step = 0; step < kSteps; ++step) {
    if (step == kFreeze) {
      leave(*optimizer, 0, 1);
      leave(*optimizer, 1, 0);
    } else if (step == kUnfreeze) {
      v[1].requires_grad_(true);
      optimizer->param_groups()[1].params().push_back(v[1]);
    } else if (step == kAdd) {
      v[2].requires_grad_(true);
      v[4].requires_grad_(true);
      optimizer->add_param_group(third_group(inner, {v[2], v[4]}));
    }
    optimizer->zero_grad();
    model.loss(gradients(v, step)).backward();
    optimizer->step();
    result.push_back(copies(v));
  }
  return result;
}

struct Way {
  int world_size = 2;
  Inner inner = Inner::kAdamW;
  c10::ScalarType dtype = c10::ScalarType::Float;
  ZeroOptions options;
};

// Also checks that all ranks hold the same, and what the groups are.
Trajectory train(const Way& way) {
  Trajectory result;
  run_ranks(way.world_size, [&](const Group& group) {
    GivenGradients model(initial(way.dtype));
    const auto& v = model.values;
    v[4].requires_grad_(false);
    ZeroOptimizer optimizer(model, make(way.inner, v), group, way.options);
    for (int step = 0; step < kSteps; ++step) {
      // In fp32, of which a bf16 parameter has a part alone.
      const bool changes = step == kFreeze || step == kUnfreeze || step == kAdd;
      const at::Tensor before = changes ? optimizer.master(v[0]).clone() : at::Tensor();
      if (step == kFreeze) {
        optimizer.freeze({v[1], v[2]});
        EXPECT_FALSE(v[1].requires_grad() || v[2].requires_grad());
        EXPECT_EQ(v[2].storage().nbytes(), v[2].nbytes()) << "the arena is not kept for it";
        ASSERT_EQ(optimizer.param_groups()[0].params().size(), 1U);
      } else if (step == kUnfreeze) {
        optimizer.unfreeze({v[1]}, 1);
        EXPECT_TRUE(v[1].requires_grad());
      } else if (step == kAdd) {
        optimizer.add_param_group(third_group(way.inner, {v[2], v[4]}));
        ASSERT_EQ(optimizer.param_groups().size(), 3U);
      }
      if (changes) {
        EXPECT_TRUE(at::equal(optimizer.master(v[0]), before)) << "step " << step;
        EXPECT_EQ(way.dtype == at::kFloat, at::equal(before, before.to(way.dtype).to(at::kFloat)));
      }
      EXPECT_EQ(optimizer.stats().steps, step);
      optimizer.backward(model.loss(gradients(v, step, group.rank(), group.world_size())));
      optimizer.step();
      optimizer.wait_for(model);
      if (group.rank() == 0) result.push_back(copies(v));
      optimizer.check_replicas();
    }
  });
  return result;
}

int64_t differing(const Trajectory& a, const Trajectory& b) {
  EXPECT_EQ(a.size(), b.size());
  int64_t count = 0;
  for (size_t s = 0; s < std::min(a.size(), b.size()); ++s) {
    for (size_t i = 0; i < a[s].size(); ++i) count += a[s][i].ne(b[s][i]).sum().item<int64_t>();
  }
  return count;
}

TEST(ReplanTest, OneRankHasTheBitsOfPlainTorch) {
  for (const Inner inner : {Inner::kSgdMomentum, Inner::kAdamW}) {
    const Way way{1, inner, at::kFloat, ZeroOptions().fused(false)};
    EXPECT_EQ(differing(train(way), train_plain(inner, at::kFloat)), 0);
  }
}

// Half of all combinations, in which each two values are together in some.
TEST(ReplanTest, EveryNumberOfRanksStageAndLayoutHasTheSameBits) {
  size_t turn = 0;
  const std::vector<ZeroOptions> kinds = {
      ZeroOptions().stage(1).bucket_bytes(256), ZeroOptions().stage(2).overlap_gather(true),
      ZeroOptions().layout(Layout::kPerParameter).bucket_bytes(512),
      ZeroOptions().layout(Layout::kWholeParameters).bucket_bytes(256)};
  for (const Inner inner : {Inner::kSgdMomentum, Inner::kAdamW}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      if (inner == Inner::kSgdMomentum && dtype == at::kBFloat16) continue;
      const Trajectory one = train({1, inner, dtype, {}});
      for (const int world_size : {2, 3, 4}) {
        for (size_t k = ++turn % 2; k < kinds.size(); k += 2) {
          EXPECT_EQ(differing(train({world_size, inner, dtype, kinds[k]}), one), 0)
              << world_size << " ranks, options " << k << ", " << dtype;
        }
      }
    }
  }
}

TEST(ReplanTest, FrozenParametersTakeNoMemoryAndNoMessages) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kBFloat16));
    const auto& v = model.values;
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    const auto step = [&] {
      optimizer.backward(model.loss(gradients(v, 0, group.rank(), 2)));
      optimizer.step();
    };
    const auto bytes_of_step = [&] {
      const Traffic before = optimizer.stats().data;
      step();
      const Traffic after = optimizer.stats().data;
      return std::pair(after.exchange_bytes_sent - before.exchange_bytes_sent,
                       after.gather_bytes_sent - before.gather_bytes_sent);
    };
    step();
    const auto [exchanged_before, gathered_before] = bytes_of_step();
    const MemoryReport before = optimizer.memory();
    optimizer.freeze({v[0]});
    const auto [exchanged_after, gathered_after] = bytes_of_step();
    const MemoryReport after = optimizer.memory();
    EXPECT_GT(exchanged_after, 0);
    EXPECT_LT(exchanged_after, exchanged_before / 2);
    EXPECT_GT(gathered_after, 0);
    EXPECT_LT(gathered_after, gathered_before / 2);
    // 231 of 360 elements, half of them on each rank, and padding.
    EXPECT_LT(after.master_parameters, before.master_parameters / 2);
    EXPECT_LT(after.optimizer_state, before.optimizer_state);
    EXPECT_LT(after.working_parameters, before.working_parameters / 2);
    EXPECT_FALSE(v[0].grad().defined());
  });
}

TEST(ReplanTest, RefusedChangesThrowOnAllRanksAndChangeNothing) {
  const Trajectory expected = train({1, Inner::kAdamW, at::kFloat, {}});
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    const at::Tensor unsuitable =
        model.register_parameter("unsuitable", at::zeros({4}, at::kDouble), false);
    v[4].requires_grad_(false);
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    const auto train_to = [&](int from, int to) {
      for (int step = from; step < to; ++step) {
        optimizer.backward(model.loss(gradients(v, step, group.rank(), 2)));
        optimizer.step();
        for (size_t i = 0; i < v.size(); ++i) {
          EXPECT_TRUE(v[i].equal(expected[static_cast<size_t>(step)][i])) << step << " " << i;
        }
      }
    };
    const auto refused = [&](const std::function<void()>& call,
                             const std::vector<std::string>& words) {
      expect_words(error_of(call), words);
      EXPECT_EQ(optimizer.param_groups().size(), 2U);
      EXPECT_TRUE(v[0].requires_grad() && !v[4].requires_grad() && !unsuitable.requires_grad());
    };
    train_to(0, 1);
    refused([&] { optimizer.freeze({}); }, {"rank", "expected parameters, got none"});
    refused([&] { optimizer.freeze({v[1], v[1]}); }, {"value1", "got it more often"});
    refused([&] { optimizer.freeze({v[4]}); }, {"value4", "managed by this optimizer"});
    refused([&] { optimizer.freeze({at::zeros({3})}); }, {"registered under no name"});
    refused([&] { optimizer.freeze({v[0], v[1], v[2], v[3]}); }, {"expected a parameter to stay"});
    refused([&] { optimizer.freeze({v[group.rank()]}); }, {"freeze()", "value0", "value1"});
    refused([&] { optimizer.unfreeze({v[0]}); }, {"value0", "not managed by this optimizer"});
    refused([&] { optimizer.unfreeze({v[4]}, 2); }, {"2 parameter groups", "number 2"});
    refused(
        [&] {
          optimizer.add_param_group({Values{v[4]}, std::make_unique<SGDOptions>(0.1)});
        },
        {"options of the inner optimizer's class"});
    {
      const auto before = optimizer.param_groups()[0].options().clone();
      optimizer.param_groups()[0].set_options(std::make_unique<SGDOptions>(0.1));
      refused([&] { optimizer.freeze({v[0]}); },
              {"parameter group 0", "got torch::optim::SGDOptions"});
      optimizer.param_groups()[0].set_options(before->clone());
    }
    const double nan = std::numeric_limits<double>::quiet_NaN();
    refused(
        [&] {
          optimizer.add_param_group({Values{v[4]}, std::make_unique<AdamWOptions>(nan)});
        },
        {"parameter group 2: expected a number as lr, got nan"});
    {
      auto& options = optimizer.param_groups()[1].options();
      const double rate = options.get_lr();
      options.set_lr(nan);
      refused([&] { optimizer.freeze({v[0]}); }, {"parameter group 1: expected a number as lr"});
      options.set_lr(rate);
    }
    {
      const auto guard = optimizer.no_sync();
      refused([&] { optimizer.freeze({v[0]}); }, {"no_sync"});
    }
    optimizer.backward(model.loss(gradients(v, 1, group.rank(), 2)));
    refused([&] { optimizer.freeze({v[0]}); }, {"expected no gradients since the last step"});
    optimizer.zero_grad();
    if (group.rank() == 0) {
      refused([&] { optimizer.freeze({v[0]}); }, {"freeze()", "step()"});
    } else {
      refused([&] { optimizer.step(); }, {"freeze()", "step()"});
    }
    train_to(1, 2);
    // All ranks find this when the new buckets are made.
    refused([&] { optimizer.unfreeze({unsuitable}); }, {"unsuitable", "Double"});
    refused([&] { optimizer.add_param_group({Values{unsuitable}}); }, {"unsuitable", "Double"});
    train_to(2, 3);
  });
}

// parameters() of a module lists a tensor once for each of its names.
TEST(ReplanTest, ATiedParameterMayBeGivenAsOftenAsItHasNames) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    model.register_parameter("tied", v[1]);
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    const auto& groups = optimizer.param_groups();
    const Values twice = {v[1], v[1]};
    const auto step = [&](int number) {
      optimizer.backward(model.loss(gradients(v, number, group.rank(), 2)));
      optimizer.step();
    };
    optimizer.freeze(twice);
    EXPECT_FALSE(v[1].requires_grad());
    step(0);
    optimizer.unfreeze(twice);
    EXPECT_EQ(groups[0].params().size(), 2U);
    step(1);
    optimizer.freeze(twice);
    optimizer.add_param_group(third_group(Inner::kAdamW, twice));
    EXPECT_EQ(groups.at(2).params().size(), 1U);
    step(2);
    EXPECT_FALSE(v[1].equal(initial(at::kFloat)[1]));
    expect_words(error_of([&] {
                   optimizer.freeze({v[1], v[1], v[1]});
                 }),
                 {"value1", "got it more often"});
  });
}

TEST(ReplanTest, MeshesAndCombinedOptimizersAreRefused) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group, ZeroOptions().mesh_group(group));
    expect_words(error_of([&] { optimizer.freeze({v[0]}); }), {"plain data parallelism"});
  });
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
    parts.push_back(std::make_unique<Muon>(Values{v[0]}, MuonOptions(0.02)));
    parts.push_back(std::make_unique<AdamW>(Values{v[1], v[2]}, AdamWOptions(0.01)));
    ZeroOptimizer optimizer(model, std::make_unique<CombinedOptimizer>(std::move(parts)), group);
    expect_words(error_of([&] { optimizer.add_param_group({Values{v[3]}}); }),
                 {"CombinedOptimizer", "unfreeze()"});
    // A group may be empty for a while.
    optimizer.freeze({v[0]});
    optimizer.unfreeze({v[3]}, 0);
    optimizer.backward(model.loss(gradients(v, 0, group.rank(), 2)));
    optimizer.step();
    EXPECT_FALSE(v[3].equal(initial(at::kFloat)[3]));
    EXPECT_TRUE(v[0].equal(initial(at::kFloat)[0]));
  });
}

// AdamW(model->parameters()) with a frozen part is how fine-tuning begins.
TEST(ReplanTest, WhatWasFrozenAtConstructionInAGroupLeavesItThere) {
  for (const bool adds : {false, true}) {
    const auto make_all = [](const Values& v) {
      std::vector<OptimizerParamGroup> groups;
      groups.emplace_back(Values{v[0]}, std::make_unique<AdamWOptions>(0.03));
      groups.emplace_back(Values{v[4], v[1]}, std::make_unique<AdamWOptions>(0.05));
      return std::make_unique<AdamW>(groups, AdamWOptions(0.05));
    };
    const auto added = [](const at::Tensor& p) {
      return OptimizerParamGroup(Values{p}, std::make_unique<AdamWOptions>(0.02));
    };
    GivenGradients plain(initial(at::kFloat));
    plain.values[4].requires_grad_(false);
    const auto torchs = make_all(plain.values);
    for (int step = 0; step < 3; ++step) {
      if (step == 1) {
        plain.values[4].requires_grad_(true);
        if (adds) {
          torchs->param_groups()[1].params().erase(torchs->param_groups()[1].params().begin());
          torchs->add_param_group(added(plain.values[4]));
        }
      }
      torchs->zero_grad();
      plain.loss(gradients(plain.values, step)).backward();
      torchs->step();
    }
    for (const int world_size : {1, 2}) {
      run_ranks(world_size, [&](const Group& group) {
        GivenGradients model(initial(at::kFloat));
        const auto& v = model.values;
        v[4].requires_grad_(false);
        ZeroOptimizer optimizer(model, make_all(v), group, ZeroOptions().fused(false));
        for (int step = 0; step < 3; ++step) {
          if (step == 1 && adds) optimizer.add_param_group(added(v[4]));
          if (step == 1 && !adds) optimizer.unfreeze({v[4]});
          optimizer.backward(model.loss(gradients(v, step, group.rank(), world_size)));
          optimizer.step();
        }
        EXPECT_EQ(optimizer.param_groups()[1].params().size(), adds ? 1U : 2U);
        for (size_t i = 0; i < v.size(); ++i) EXPECT_TRUE(v[i].equal(plain.values[i])) << i;
      });
    }
  }
}

// As a backbone that is thawed later, with an optimizer of its own.
TEST(ReplanTest, WhatWasFrozenInAGroupMayBeTrainedByAnotherOptimizerSince) {
  const auto train = [](const Group& group, bool in_group, std::latch& connected) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    const ZeroOptions options = ZeroOptions().protect(100);
    v[4].requires_grad_(false);
    Values own = {v[0], v[1], v[2]};
    if (in_group) own.push_back(v[4]);
    ZeroOptimizer first(model, std::make_unique<AdamW>(own, AdamWOptions(0.05)), group, options);
    v[4].requires_grad_(true);
    ZeroOptimizer second(model, std::make_unique<AdamW>(Values{v[4]}, AdamWOptions(0.02)), group,
                         options);
    int number = 0;
    const auto step = [&] {
      first.backward(model.loss(gradients(v, ++number, group.rank(), 2)));
      first.step();
      second.step();
    };
    step();
    first.freeze({v[0]});
    step();
    first.unfreeze({v[0]});
    step();
    first.add_param_group(third_group(Inner::kAdamW, {v[3]}));
    step();
    first.resize_rows({{v[0], at::arange(5)}});
    step();
    const auto failing = first.group().make_communicator("own", Purpose::kControl);
    connected.arrive_and_wait();
    failing->abort("as in a test");
    first.recover();
    second.recover();
    step();
    EXPECT_EQ(first.param_groups()[0].params().size(), own.size());
    return copies(v);
  };
  std::latch with(2), without(2);
  run_ranks(2, [&](const Group& group) {
    const Values values = train(group, true, with), expected = train(group, false, without);
    for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(values[i].equal(expected[i])) << i;
  });
}

// It would be trained from the next step on by a call that does not name it.
TEST(ReplanTest, WhatWasFrozenInAGroupIsTrainedWhenACallNamesIt) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    v[4].requires_grad_(false);
    ZeroOptimizer optimizer(model, std::make_unique<AdamW>(Values{v[0], v[1], v[4]}), group);
    v[4].requires_grad_(true);
    optimizer.freeze({v[0]});
    optimizer.backward(model.loss(gradients(v, 0, group.rank(), 2)));
    expect_words(error_of([&] { optimizer.step(); }), {"value4", "unfreeze()"});
    optimizer.zero_grad();
    v[4].mutable_grad().reset();
    optimizer.unfreeze({v[4]});
    optimizer.backward(model.loss(gradients(v, 0, group.rank(), 2)));
    optimizer.step();
    EXPECT_FALSE(v[4].equal(initial(at::kFloat)[4]));
  });
}

TEST(ReplanTest, AnUnfrozenParameterReturnsToItsGroup) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    optimizer.freeze({v[3], v[0]});
    optimizer.freeze({v[1]});
    optimizer.unfreeze({v[0], v[3], v[4]});
    const auto& groups = optimizer.param_groups();
    ASSERT_EQ(groups[0].params().size(), 2U);  // v[4] was in none
    EXPECT_TRUE(groups[0].params()[0].is_same(v[0]));
    EXPECT_TRUE(groups[0].params()[1].is_same(v[4]));
    ASSERT_EQ(groups[1].params().size(), 2U);
    EXPECT_TRUE(groups[1].params()[1].is_same(v[3]));
    optimizer.unfreeze({v[1]}, 1);
    EXPECT_EQ(groups[1].params().size(), 3U);
  });
}

TEST(ReplanTest, WhatTheClassOfAGroupRefusesChangesNothing) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    const at::Tensor buffer =
        model.register_buffer("own", at::full({1}, static_cast<double>(group.rank())));
    std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
    parts.push_back(std::make_unique<Muon>(Values{v[0]}, MuonOptions(0.02)));
    parts.push_back(std::make_unique<AdamW>(Values{v[1], v[2]}, AdamWOptions(0.01)));
    ZeroOptimizer optimizer(model, std::make_unique<CombinedOptimizer>(std::move(parts)), group);
    optimizer.freeze({v[1]});
    buffer.fill_(group.rank());  // which a construction would overwrite
    expect_words(error_of([&] { optimizer.unfreeze({v[1]}, 0); }),
                 {"rank " + std::to_string(group.rank()), "value1", "Muon: expected matrices"});
    EXPECT_EQ(buffer.item<int>(), group.rank());
    EXPECT_FALSE(v[1].requires_grad());
    optimizer.unfreeze({v[1]});  // AdamW's
    optimizer.backward(model.loss(gradients(v, 0, group.rank(), 2)));
    optimizer.step();
    EXPECT_FALSE(v[1].equal(initial(at::kFloat)[1]));
  });
}

TEST(ReplanTest, MemoryThatIsSharedIsRefusedAndChangesNothing) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    const at::Tensor view = model.register_parameter("view", v[4].detach().view({10, 10}).t());
    expect_words(error_of([&] {
                   optimizer.add_param_group({Values{view, v[4]}});
                 }),
                 {"view", "value4", "expected memory of its own"});
    optimizer.backward(model.loss(gradients(v, 0, group.rank(), 2)));
    optimizer.step();
    EXPECT_EQ(optimizer.param_groups().size(), 2U);
  });
}

// Construction would find it when nothing can be taken back any more.
TEST(ReplanTest, WhatTheProgramHasChangedBeforeIsRefusedAndChangesNothing) {
  struct Job {
    GivenGradients model{initial(at::kFloat)};
    std::unique_ptr<ZeroOptimizer> optimizer;
    bool differs = false;
    void require(const std::vector<size_t>& of, bool required) {
      for (const size_t i : of) model.values[i].requires_grad_(required);
    }
    void set_rate(double rate) { optimizer->param_groups()[1].options().set_lr(rate); }
  };
  using Change = std::function<void(Job&)>;
  const auto refuses = [](const std::vector<std::string>& words, const Change& change,
                          const Change& repair) {
    run_ranks(2, [&](const Group& group) {
      Job job;
      job.differs = group.rank() == 1;
      const auto& v = job.model.values;
      job.optimizer = std::make_unique<ZeroOptimizer>(job.model, make(Inner::kAdamW, v), group);
      change(job);
      expect_words(error_of([&] { job.optimizer->freeze({v[0]}); }), words);
      repair(job);
      EXPECT_TRUE(v[0].requires_grad());
      EXPECT_EQ(error_of([&] {
                  job.optimizer->backward(job.model.loss(gradients(v, 0, group.rank(), 2)));
                  job.optimizer->step();
                  job.optimizer->freeze({v[0]});
                }),
                "");
    });
  };
  refuses(
      {"freeze(): expected the same", "rank 0: options of parameter group 1", "lr 0.02", "lr 0.04",
       "make the call with the same"},
      [](Job& job) { job.set_rate(job.differs ? 0.04 : 0.02); },
      [](Job& job) { job.set_rate(0.02); });
  const auto register_late = [](Job& job) { job.model.register_buffer("late", at::ones({2})); };
  refuses(
      {"rank 0: buffer late", "rank 1: "},
      [&](Job& job) {
        if (!job.differs) register_late(job);
      },
      [&](Job& job) {
        if (job.differs) register_late(job);
      });
  refuses(
      {"rank 1", "parameter value3", "does not name", "let freeze() take it too"},
      [](Job& job) { job.require({3}, !job.differs); }, [](Job& job) { job.require({3}, true); });
  // Alike on all ranks, too.
  refuses(
      {"parameter value3", "does not name"}, [](Job& job) { job.require({3}, false); },
      [](Job& job) { job.require({3}, true); });
  // Which no optimizer trains.
  refuses(
      {"value5 of no ZeroOptimizer"}, [](Job& job) { job.require({5}, !job.differs); },
      [](Job& job) { job.require({5}, true); });
  refuses(
      {"parameter value1", "does not name"},
      [](Job& job) {
        job.require({0, 1, 2, 3}, false);
      },
      [](Job& job) {
        job.require({0, 1, 2, 3}, true);
      });
  at::Tensor views[2];
  refuses(
      {"value3", "buffer view", "expected memory of its own"},
      [&](Job& job) {
        views[job.differs] = job.model.register_buffer("view", job.model.values[3].detach());
      },
      [&](Job& job) { views[job.differs].set_data(views[job.differs].clone()); });
}

TEST(ReplanTest, AfterAChangeThatFailedTheOptimizerCanBeReadStill) {
  for (const bool foreign : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      GivenGradients model(initial(at::kFloat));
      const auto& v = model.values;
      bool fails = false;
      ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group,
                              ZeroOptions()
                                  .layout(Layout::kWholeParameters)
                                  .owner_cost([&](c10::IntArrayRef sizes) -> int64_t {
                                    if (fails && foreign) throw 1;
                                    TORCH_CHECK(!fails, "no cost");
                                    return static_cast<int64_t>(sizes.size());
                                  }));
      fails = group.rank() == 1;
      expect_words(error_of([&] { optimizer.freeze({v[0]}); }),
                   {foreign ? "no std::exception" : "no cost"});
      EXPECT_GT(optimizer.memory().working_parameters, 0);
      EXPECT_EQ(optimizer.inner().param_groups().size(), 2U);
      EXPECT_TRUE(v[0].requires_grad());
      EXPECT_NE(error_of([&] { optimizer.step(); }), "");
    });
  }
}

TEST(ReplanTest, ACheckpointOfTheChangedGroupsGoesOn) {
  const std::string folder = ::testing::TempDir() + "/replan";
  std::filesystem::remove_all(folder);
  const Trajectory expected = train({1, Inner::kAdamW, at::kFloat, {}});
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    v[4].requires_grad_(false);
    const auto step = [&](ZeroOptimizer& optimizer, int number) {
      optimizer.backward(model.loss(gradients(v, number, group.rank(), 2)));
      optimizer.step();
      for (size_t i = 0; i < v.size(); ++i) {
        EXPECT_TRUE(v[i].equal(expected[static_cast<size_t>(number)][i])) << number << " " << i;
      }
    };
    {
      ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
      for (int number = 0; number < kFreeze; ++number) step(optimizer, number);
      optimizer.save_checkpoint(folder + "-before", SaveOptions().overwrite(true));
      optimizer.freeze({v[1], v[2]});
      step(optimizer, kFreeze);
      optimizer.save_checkpoint(folder);
      const std::string run = describe_checkpoint(folder).run;
      EXPECT_FALSE(run.empty());
      EXPECT_EQ(describe_checkpoint(folder + "-before").run, run);
    }
    for (const at::Tensor& p : v) p.detach().zero_();
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(Values{v[0]}, std::make_unique<AdamWOptions>(1.0));
    groups.emplace_back(Values{v[3]}, std::make_unique<AdamWOptions>(1.0));
    ZeroOptimizer optimizer(model, std::make_unique<AdamW>(groups, AdamWOptions(1.0)), group);
    optimizer.load_checkpoint(folder);
    EXPECT_TRUE(v[2].equal(expected[kFreeze][2])) << "frozen parameters are stored too";
    for (int number = kFreeze + 1; number < kUnfreeze; ++number) step(optimizer, number);
  });
}

TEST(ReplanTest, ASaveUnderWayRefusesAChangeAndIsCompleted) {
  const std::string folder = ::testing::TempDir() + "/replan-pending";
  std::filesystem::remove_all(folder);
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    auto pending = optimizer.save_checkpoint_async(folder);
    const std::vector<std::function<void()>> changes = {
        [&] { optimizer.freeze({v[0]}); },
        [&] {
          optimizer.resize_rows({{v[0], at::arange(3)}});
        }};
    for (const auto& change : changes) {
      expect_words(error_of(change), {"expected no save under way", folder, "finish()"});
    }
    pending->finish();
    EXPECT_EQ(describe_checkpoint(folder).steps, 0);
    optimizer.freeze({v[0]});
    // One that is given up is no reason.
    pending = optimizer.save_checkpoint_async(folder, SaveOptions().overwrite(true));
    pending.reset();
    optimizer.resize_rows({{v[1], at::arange(3)}});
    optimizer.check_replicas();
  });
}

// All of a group may be frozen; its number and options stay.
TEST(ReplanTest, AnEmptyGroupIsSavedLoadedAndFilledAgain) {
  const std::string folder = ::testing::TempDir() + "/replan-empty";
  std::filesystem::remove_all(folder);
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    const auto step = [&](ZeroOptimizer& optimizer, int number) {
      optimizer.backward(model.loss(gradients(v, number, group.rank(), 2)));
      optimizer.step();
    };
    Values expected;
    {
      ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
      step(optimizer, 0);
      optimizer.freeze({v[0], v[1]});
      EXPECT_TRUE(optimizer.param_groups()[0].params().empty());
      step(optimizer, 1);
      optimizer.save_checkpoint(folder);
      optimizer.unfreeze({v[0]});
      step(optimizer, 2);
      expected = copies(v);
    }
    v[0].requires_grad_(false);
    for (const at::Tensor& p : v) p.detach().zero_();
    auto inner = make(Inner::kAdamW, v);
    inner->param_groups()[0].params().clear();
    ZeroOptimizer optimizer(model, std::move(inner), group);
    optimizer.load_checkpoint(folder);
    optimizer.unfreeze({v[0]});
    step(optimizer, 2);
    for (size_t i = 0; i < v.size(); ++i) EXPECT_TRUE(v[i].equal(expected[i])) << i;
  });
}

// Else all that stays would go back to the masters of before.
TEST(ReplanTest, LoadedParametersAreRefusedUntilTheMastersAreReadAgain) {
  for (const int world_size : {1, 2}) {
    for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      run_ranks(world_size, [&](const Group& group) {
        GivenGradients model(initial(dtype));
        const auto& v = model.values;
        v[4].requires_grad_(false);
        ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
        for (const at::Tensor& p : v) p.set_data(at::full_like(p, 3));
        const std::vector<std::function<void()>> changes = {
            [&] {
              optimizer.freeze({v[1], v[2]});
            },
            [&] { optimizer.unfreeze({v[4]}, 1); },
            [&] { optimizer.add_param_group(third_group(Inner::kAdamW, {v[5]})); }};
        for (const auto& change : changes) {
          expect_words(error_of(change), {"value0", "expected the storage the last step left",
                                          "call refresh_master_parameters()"});
          optimizer.refresh_master_parameters();
          change();
          for (size_t i = 0; i < v.size(); ++i) EXPECT_TRUE(v[i].eq(3).all().item<bool>()) << i;
          v[0].set_data(at::full_like(v[0], 3));
        }
      });
    }
  }
}

// requires_grad may be set before the call that says so.
TEST(ReplanTest, GradientsMayBeSwitchedBeforeTheCall) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    v[1].requires_grad_(false);
    optimizer.freeze({v[1]});
    v[1].requires_grad_(true);
    optimizer.unfreeze({v[1]});
    optimizer.backward(model.loss(gradients(v, 0, group.rank(), 2)));
    optimizer.step();
    EXPECT_EQ(optimizer.stats().steps, 1);
  });
}

TEST(ReplanTest, AScheduleGoesOnWithTheGroupThatIsAdded) {
  run_ranks(2, [](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group);
    LrSchedule schedule(optimizer, linear_decay(8));
    optimizer.freeze({v[0]});
    schedule.set_step(3);
    optimizer.add_param_group(third_group(Inner::kAdamW, {v[4]}));
    schedule.step();
    const std::vector<double> base = {0.05, 0.02, 0.01};
    for (size_t g = 0; g < base.size(); ++g) {
      EXPECT_EQ(optimizer.param_groups()[g].options().get_lr(), base[g] * 0.5) << g;
    }
  });
}

// Two parameter groups whose rates fall in 8 steps, and a third one that comes later.
struct Scheduled {
  explicit Scheduled(const Group& group)
      : model(initial(at::kFloat)),
        optimizer(model, make(Inner::kAdamW, model.values), group),
        schedule(optimizer, linear_decay(8)) {}

  void add_group() { optimizer.add_param_group(third_group(Inner::kAdamW, {model.values[4]})); }
  void save_step_4(const std::string& folder) {
    schedule.set_step(4);
    optimizer.save_checkpoint(folder);
  }
  void expect_rates(double factor) {
    for (size_t g = 0; g < base.size(); ++g) {
      EXPECT_EQ(optimizer.param_groups()[g].options().get_lr(), base[g] * factor) << g;
    }
  }

  const std::vector<double> base = {0.05, 0.02, 0.01};
  GivenGradients model;
  ZeroOptimizer optimizer;
  LrSchedule schedule;
};

// A load sets the rates of another step, and what the group was added with is gone.
TEST(ReplanTest, AScheduleTakesNoLoadedRateForTheBaseOfTheGroupThatIsAdded) {
  const std::string folder = ::testing::TempDir() + "/replan-schedule";
  std::filesystem::remove_all(folder);
  for (const int way : {0, 1, 2}) {  // 0 saves
    run_ranks(2, [&](const Group& group) {
      Scheduled s(group);
      s.add_group();
      if (way == 0) return s.save_step_4(folder);
      if (way == 1) s.schedule.set_step(0);
      s.optimizer.load_checkpoint(folder);
      s.expect_rates(0.5);
      if (way == 1) {
        s.schedule.set_step(6);
        s.expect_rates(0.25);
        return;
      }
      for (const auto& call : std::vector<std::function<void()>>{[&] { s.schedule.set_step(6); },
                                                                 [&] { s.schedule.step(); },
                                                                 [&] { s.schedule.state(); }}) {
        expect_words(error_of(call), {"parameter group 2", "0.025", "set_step()"});
      }
      s.expect_rates(0.5);
      EXPECT_EQ(s.schedule.steps(), 0);
    });
  }
}

// With the load in front, the rate of the group is its base, which only the program knows.
TEST(ReplanTest, AScheduleGoesOnWithTheGroupThatIsAddedBehindALoad) {
  const std::string folder = ::testing::TempDir() + "/replan-schedule-load";
  std::filesystem::remove_all(folder);
  for (const int way : {0, 1, 2}) {  // 0 saves
    run_ranks(2, [&](const Group& group) {
      Scheduled s(group);
      if (way == 0) return s.save_step_4(folder);
      s.optimizer.load_checkpoint(folder);
      if (way == 1) s.schedule.set_step(4);
      s.add_group();
      if (way == 2) {
        expect_words(error_of([&] { s.schedule.set_step(4); }),
                     {"[0.05, 0.02]", "[0.025, 0.01]", "before or after parameter group 2",
                      "before add_param_group()"});
        // As it says.
        for (size_t g = 0; g < s.base.size(); ++g) {
          s.optimizer.param_groups()[g].options().set_lr(s.base[g]);
        }
      }
      s.schedule.set_step(6);
      s.expect_rates(0.25);
      EXPECT_EQ(s.schedule.steps(), 6);
    });
  }
}

// The protected step of now has the parameters of now, also for the ranks that are left.
TEST(ReplanTest, ProtectionGoesOnWithTheNewParameters) {
  const std::string folder = ::testing::TempDir() + "/replan-protected";
  std::filesystem::remove_all(folder);
  Values left;
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    v[4].requires_grad_(false);
    auto optimizer = std::make_unique<ZeroOptimizer>(model, make(Inner::kAdamW, v), group,
                                                     ZeroOptions().protect(1));
    const auto step = [&](int number, int rank, int world_size) {
      optimizer->backward(model.loss(gradients(v, number, rank, world_size)));
      optimizer->step();
    };
    for (int number = 0; number < kFreeze; ++number) step(number, group.rank(), 2);
    optimizer->freeze({v[1], v[2]});
    EXPECT_GT(optimizer->memory().protected_steps, 0);
    const auto pending = optimizer->save_checkpoint_async(folder);
    if (group.rank() == 1) return;
    optimizer->backward(model.loss(gradients(v, kFreeze, 0, 2)));
    EXPECT_NE(error_of([&] { optimizer->step(); }), "");
    EXPECT_EQ(optimizer->recover().steps, kFreeze);
    for (int number = kFreeze; number < kUnfreeze; ++number) step(number, 0, 1);
    left = copies(v);
    // The save cannot be ended any more, so it refuses nothing.
    optimizer->freeze({v[0]});
    expect_words(error_of([&] { pending->finish(); }), {"gone through recover()"});
  });
  const Trajectory expected = train({1, Inner::kAdamW, at::kFloat, {}});
  ASSERT_FALSE(left.empty());
  for (size_t i = 0; i < left.size(); ++i)
    EXPECT_TRUE(left[i].equal(expected[kUnfreeze - 1][i])) << i;
}

// A group that the constructor did not know has its own options again.
TEST(ReplanTest, RecoverKnowsAGroupThatWasAdded) {
  std::latch connected(2);
  run_ranks(2, [&](const Group& group) {
    GivenGradients model(initial(at::kFloat));
    const auto& v = model.values;
    v[4].requires_grad_(false);
    ZeroOptimizer optimizer(model, make(Inner::kAdamW, v), group, ZeroOptions().protect(1));
    const auto step = [&](int number) {
      optimizer.backward(model.loss(gradients(v, number, group.rank(), 2)));
      optimizer.step();
    };
    step(0);
    optimizer.add_param_group(third_group(Inner::kAdamW, {v[4]}));
    step(1);
    step(2);
    const Values before = copies(v);
    const auto own = optimizer.group().make_communicator("own", Purpose::kControl);
    connected.arrive_and_wait();
    own->abort("as in a test");
    const auto steps = static_cast<int>(optimizer.recover().steps);
    for (int number = steps; number < 3; ++number) step(number);
    for (size_t i = 0; i < v.size(); ++i) EXPECT_TRUE(v[i].equal(before[i])) << i;
    const auto& added = optimizer.param_groups().at(2).options();
    EXPECT_EQ(static_cast<const AdamWOptions&>(added).lr(), 0.01);
  });
}

// A rank dies within freeze(), before the state of now is protected or after that. The step before
// has other values of what is frozen now.
TEST(ReplanTest, AfterAChangeTheStepsOfBeforeAreOlder) {
  static thread_local int left = -1;  // gathers of this rank to its death; -1: it does not die
  message_probe = [](const std::string& what) {
    if (left >= 0 && what.find("all_gather_text of freeze()") != std::string::npos) {
      TORCH_CHECK(left-- > 0, "a death");
    }
  };
  // A text is two gathers: those of the copies, of the loaded state, and of the protected one.
  for (const bool is_protected : {false, true}) {
    run_ranks(3,
              [&](const Group& group) {
                GivenGradients model(initial(at::kFloat));
                const auto& v = model.values;
                v[4].requires_grad_(false);
                auto optimizer = std::make_unique<ZeroOptimizer>(model, make(Inner::kAdamW, v),
                                                                 group, ZeroOptions().protect(2));
                for (int number = 0; number < 3; ++number) {
                  optimizer->backward(model.loss(gradients(v, number, group.rank(), 3)));
                  optimizer->step();
                }
                if (group.rank() == 2) {
                  left = is_protected ? 4 : 2;
                  EXPECT_NE(error_of([&] { optimizer->freeze({v[1]}); }), "");
                  left = -1;
                  return;
                }
                EXPECT_THROW(optimizer->freeze({v[1]}), CommunicationError);
                if (is_protected) {
                  EXPECT_EQ(optimizer->recover().steps, 3);
                } else {
                  expect_words(error_of([&] { optimizer->recover(); }),
                               {"value1", "ended within freeze()", "checkpoint"});
                }
              },
              {.timeout = std::chrono::seconds(8)});
  }
  message_probe = nullptr;
}

}  // namespace
}  // namespace zero
