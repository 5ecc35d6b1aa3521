// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The shards of all ranks, one after another in this thread, against the same optimizer of torch on
// whole parameters.
#include "zero/update/shard_optimizer.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "tests/support/reducer_options.h"
#include "zero/adafactor.h"
#include "zero/communicator.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/lamb.h"
#include "zero/lion.h"
#include "zero/muon.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Tensors&)>;

const std::vector<uint8_t> kAll{1, 1, 1, 1};

Tensors initial(c10::ScalarType dtype) {
  return {random_tensor({3, 5}, 1).to(dtype), random_tensor({7}, 2).to(dtype),
          random_tensor({1}, 3).to(dtype), random_tensor({33}, 4).to(dtype)};
}

at::Tensor gradient(int64_t p, int step) {
  return random_tensor(initial(at::kFloat)[p].sizes(), 100 + 10 * step + p);
}

at::Tensor scalar(double value) { return at::scalar_tensor(value, at::kDouble); }

std::unique_ptr<torch::optim::Optimizer> make_adamw(const Tensors& parameters) {
  return std::make_unique<torch::optim::AdamW>(parameters,
                                               torch::optim::AdamWOptions(0.1).weight_decay(0.05));
}

std::unique_ptr<torch::optim::Optimizer> make_sgd(const Tensors& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters,
                                             torch::optim::SGDOptions(0.1).momentum(0.9));
}

// One rank's share of the model.
struct Shard {
  Shard(int64_t rank_in, int64_t world_size, const Make& make, const PlanOptions& plan,
        c10::ScalarType dtype, ShardOptimizer::Options options)
      : rank(rank_in),
        flat(initial(dtype), world_size, plan),
        arena(flat.plan, flat.table, flat.pool),
        reducer(flat.plan, flat.table, {{&data, nullptr, 0}}, flat.pool,
                reducer_options(flat.plan)),
        optimizer({flat.plan, flat.table, {rank}, arena, reducer, flat.pool},
                  make(flat.model.values), options) {}

  void set_gradients(int step) {
    for (const SegmentTensors& s : optimizer.segments()) {
      at::Tensor(s.gradient).copy_(part_of(gradient(s.segment.parameter, step), s.segment));
    }
  }
  // Gives this rank's rows to the model, as a gather does. `before` is called for each bucket
  // before it changes, and for all before the inner optimizer steps.
  void update(
      const std::vector<uint8_t>& used = kAll, double coefficient = 1,
      const at::Tensor& nonfinite = {},
      const std::function<void(int64_t bucket)>& before = [](int64_t) {}) {
    optimizer.begin_update({{}, scalar(coefficient)}, nonfinite, int64_t{1});
    optimizer.mark_used(used);
    for (const bool is_fused : {true, false}) {
      bool any = false;
      for (int64_t b = flat.buckets() - 1; b >= 0; --b) {
        if (optimizer.is_fused(b) != is_fused) continue;
        if (!is_fused && !std::exchange(any, true)) {
          before(0);
          optimizer.update_inner();
        }
        before(b);
        arena.publish(b, optimizer.update(b));
      }
    }
    optimizer.end_update();
  }
  // That masters are these parameters, and working values these rounded.
  void expect_parameters(const Tensors& expected, double tolerance = 2e-6) {
    for (const SegmentTensors& s : optimizer.segments()) {
      const at::Tensor& working = flat.model.values[s.segment.parameter];
      EXPECT_TRUE(at::allclose(s.master, part_of(expected[s.segment.parameter], s.segment),
                               tolerance, tolerance))
          << "parameter " << s.segment.parameter << " on rank " << rank;
      EXPECT_TRUE(
          at::equal(part_of(working, s.segment), s.master.to(working.scalar_type()).to(at::kFloat)))
          << "parameter " << s.segment.parameter << " on rank " << rank;
    }
  }
  Tensors masters() const {
    Tensors result;
    for (const SegmentTensors& s : optimizer.segments()) result.push_back(s.master.clone());
    return result;
  }

  const int64_t rank;
  FlatModel flat;
  WorkingArena arena;
  Communicator data{nullptr, "data", std::chrono::seconds(1)};  // Nothing is sent.
  GradientReducer reducer;
  ShardOptimizer optimizer;
};

// Torch on the whole parameters, in fp32.
struct Plain {
  Plain(const Make& make, c10::ScalarType dtype) {
    for (const at::Tensor& value : initial(dtype)) {
      parameters.push_back(value.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
    optimizer = make(parameters);
  }
  void step(int number, const std::vector<uint8_t>& used = kAll, double coefficient = 1) {
    for (size_t p = 0; p < parameters.size(); ++p) {
      parameters[p].mutable_grad().reset();
      if (used[p] != 0) parameters[p].mutable_grad() = gradient(p, number) * coefficient;
    }
    optimizer->step();
  }
  Tensors parameters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

bool same(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

TEST(ShardOptimizerTest, ShardsOfAllRanksEqualTorchOnWholeParameters) {
  for (const Make& make : {Make(make_adamw), Make(make_sgd)}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        for (const ShardOptimizer::Options& options :
             {ShardOptimizer::Options{true, false}, {true, true}, {false, false}}) {
          for (const int64_t world_size : {1, 2, 3, 4}) {
            int64_t elements = 0;
            for (int64_t rank = 0; rank < world_size; ++rank) {
              Plain plain(make, dtype);
              Shard shard(rank, world_size, make, {layout, 256}, dtype, options);
              shard.expect_parameters(plain.parameters);
              const std::vector<uint8_t> some{1, 0, 1, 1};
              for (int step = 0; step < 3; ++step) {
                const auto& used = step == 1 ? some : kAll;
                const double coefficient = step == 2 ? 0.25 : 1;
                plain.step(step, used, coefficient);
                shard.set_gradients(step);
                shard.update(used, coefficient);
                shard.expect_parameters(plain.parameters);
              }
              for (const SegmentTensors& s : shard.optimizer.segments()) {
                elements += s.segment.numel;
              }
            }
            EXPECT_EQ(elements, 15 + 7 + 1 + 33);
          }
        }
      }
    }
  }
}

// Written down: the bits of a run that goes on from a checkpoint depend on it, and parameters with
// one number would round alike.
TEST(ShardOptimizerTest, TheNumberOfTheNoiseIsTheHashOfTheName) {
  EXPECT_EQ(noise_number("value0"), -5498762426335662477);
  EXPECT_EQ(noise_number("value1"), 4569593570436516055);
}

TEST(ShardOptimizerTest, NothingChangesBeforeItIsAnnounced) {
  for (const bool fused : {true, false}) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      Shard shard(0, 1, make_adamw, {Layout::kContiguous, 64}, dtype, {fused, false});
      ASSERT_GT(shard.flat.buckets(), 2);
      shard.set_gradients(0);
      shard.update();
      shard.set_gradients(1);
      // Masters and states, by segment.
      const auto now = [&] {
        std::vector<Tensors> result;
        for (const SegmentTensors& s : shard.optimizer.segments()) {
          result.push_back({s.master.clone()});
          const auto& state =
              *shard.optimizer.inner_with_counts().state().at(s.master.unsafeGetTensorImpl());
          adapter_of(state).visit_tensors(state, [&](const char*, const at::Tensor& tensor) {
            result.back().push_back(tensor.clone());
          });
        }
        return result;
      };
      const std::vector<Tensors> before = now();
      int64_t announced = shard.flat.buckets();
      const auto check = [&](int64_t bucket) {
        const std::vector<Tensors> current = now();
        for (size_t i = 0; i < current.size(); ++i) {
          const int64_t b = shard.optimizer.segments()[i].segment.bucket;
          if (b >= announced) continue;
          EXPECT_TRUE(same(current[i], before[i])) << "bucket " << b;
        }
        announced = std::min(announced, bucket);
      };
      shard.update(kAll, 1, {}, check);
      EXPECT_EQ(announced, 0);
      const std::vector<Tensors> after = now();
      for (size_t i = 0; i < after.size(); ++i) EXPECT_FALSE(same(after[i], before[i]));
    }
  }
}

TEST(ShardOptimizerTest, AStepThatIsSkippedOnTheDeviceChangesNothing) {
  Shard shard(0, 2, make_adamw, {Layout::kContiguous, 256}, at::kFloat, {true, true});
  ASSERT_TRUE(shard.optimizer.deferred());
  Plain plain(make_adamw, at::kFloat);
  plain.step(0);
  plain.step(2);
  shard.set_gradients(0);
  shard.update(kAll, 1, scalar(0));
  const Tensors before = shard.masters();
  shard.set_gradients(1);
  for (const SegmentTensors& s : shard.optimizer.segments()) at::Tensor(s.gradient).fill_(NAN);
  shard.update(kAll, 1, scalar(3));
  EXPECT_TRUE(same(shard.masters(), before));
  // Neither was it counted.
  const auto& state = shard.optimizer.inner_with_counts().state();
  const auto& first = *state.at(shard.optimizer.segments()[0].master.unsafeGetTensorImpl());
  EXPECT_EQ(static_cast<const torch::optim::AdamWParamState&>(first).step(), 1);
  shard.set_gradients(2);
  shard.update(kAll, 1, scalar(0));
  shard.expect_parameters(plain.parameters);
}

// The step without momentum must not count as its first one.
TEST(ShardOptimizerTest, AMomentumWhoseFirstStepWasSkippedHasNoState) {
  const Make make = [](const Tensors& parameters) {
    return std::make_unique<torch::optim::SGD>(
        parameters, torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.5));
  };
  for (const bool looks : {false, true}) {
    Shard shard(0, 1, make, {Layout::kContiguous, 256}, at::kFloat, {true, true});
    Plain plain(make, at::kFloat);
    auto& groups = plain.optimizer->param_groups();
    const auto set_momentum = [&](double momentum) {
      static_cast<torch::optim::SGDOptions&>(groups[0].options()).momentum(momentum);
      shard.optimizer.groups().push(groups);
    };
    const auto step = [&](int number) {
      plain.step(number);
      shard.set_gradients(number);
      shard.update(kAll, 1, scalar(0));
    };
    shard.set_gradients(0);
    shard.update(kAll, 1, scalar(1));  // skipped
    set_momentum(0);
    step(1);
    if (looks) {
      EXPECT_TRUE(shard.optimizer.inner_with_counts().state().empty());
    }
    set_momentum(0.9);
    step(2);
    step(3);
    shard.expect_parameters(plain.parameters);
  }
}

TEST(ShardOptimizerTest, CountsOfALoadedStateAreTakenOver) {
  Shard shard(0, 1, make_adamw, {Layout::kContiguous, 256}, at::kFloat, {true, true});
  Plain plain(make_adamw, at::kFloat);
  for (const int step : {0, 1}) {
    plain.step(step);
    shard.set_gradients(step);
    shard.update();
  }
  for (const auto& item : shard.optimizer.inner_with_counts().state()) {
    static_cast<torch::optim::AdamWParamState&>(*item.second).step(9);
  }
  for (const auto& item : plain.optimizer->state()) {
    static_cast<torch::optim::AdamWParamState&>(*item.second).step(9);
  }
  shard.optimizer.adopt_inner_state();
  plain.step(2);
  shard.set_gradients(2);
  shard.update();
  shard.expect_parameters(plain.parameters);
}

TEST(ShardOptimizerTest, PushedOptionsAreThoseOfTheNextUpdate) {
  for (const bool fused : {true, false}) {
    Shard shard(0, 1, make_sgd, {Layout::kContiguous, 256}, at::kFloat, {fused, false});
    Plain plain(make_sgd, at::kFloat);
    plain.optimizer->param_groups()[0].options().set_lr(0.5);
    plain.step(0);
    shard.optimizer.groups().push(plain.optimizer->param_groups());
    shard.set_gradients(0);
    shard.update();
    shard.expect_parameters(plain.parameters);
    shard.optimizer.inner_with_counts().param_groups()[0].options().set_lr(0.7);
    expect_words(error_of([&] { shard.optimizer.groups().push(plain.optimizer->param_groups()); }),
                 {"parameter group 0", "options as they were pushed"});
  }
}

// As if its state were as old as that of the other averages.
TEST(ShardOptimizerTest, AnOptionThatIsSwitchedOnBeginsWithZeros) {
  for (const bool fused : {true, false}) {
    Shard shard(0, 1, make_adamw, {Layout::kContiguous, 256}, at::kFloat, {fused, false});
    Plain plain(make_adamw, at::kFloat);
    plain.step(0);
    shard.set_gradients(0);
    shard.update();
    auto& groups = plain.optimizer->param_groups();
    static_cast<torch::optim::AdamWOptions&>(groups[0].options()).amsgrad(true);
    for (const at::Tensor& p : plain.parameters) {
      auto& state = *plain.optimizer->state().at(p.unsafeGetTensorImpl());
      static_cast<torch::optim::AdamWParamState&>(state).max_exp_avg_sq(at::zeros_like(p));
    }
    plain.step(1);
    shard.optimizer.groups().push(groups);
    shard.set_gradients(1);
    shard.update();
    shard.expect_parameters(plain.parameters);
  }
}

TEST(ShardOptimizerTest, OptionsOfAnotherClassAreRefused) {
  for (const bool fused : {true, false}) {
    Shard shard(0, 1, make_adamw, {Layout::kContiguous, 256}, at::kFloat, {fused, false});
    Plain plain(make_sgd, at::kFloat);
    expect_words(error_of([&] { shard.optimizer.groups().push(plain.optimizer->param_groups()); }),
                 {"parameter group 0", "AdamWOptions", "SGDOptions"});
    shard.set_gradients(0);
    shard.update();
  }
}

TEST(ShardOptimizerTest, OptionsThatCannotTrainAreRefusedAndAreNotTaken) {
  struct Case {
    Make make;
    std::function<void(torch::optim::OptimizerOptions&)> change;
    std::string words;
  };
  const auto rate = [](double value) {
    return [value](torch::optim::OptimizerOptions& o) { o.set_lr(value); };
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const Make make_lion = [](const Tensors& all) { return std::make_unique<Lion>(all); };
  const Make make_lamb = [](const Tensors& all) { return std::make_unique<Lamb>(all); };
  const Make make_adafactor = [](const Tensors& all) { return std::make_unique<Adafactor>(all); };
  const Make make_muon = [](const Tensors& all) {
    const auto row = [](const at::Tensor& t) { return std::vector{t.view({1, -1})}; };
    return std::make_unique<Muon>(all, MuonOptions(0.1).split(row));
  };
  const auto misspelt = [](torch::optim::OptimizerOptions& o) {
    static_cast<MuonOptions&>(o).adjust_lr_fn("match_rms_adam");
  };
  for (const Case& c : std::vector<Case>{
           {make_sgd, rate(nan), "parameter group 0: expected a number as lr, got nan"},
           {make_adamw, rate(infinity), "parameter group 0: expected a number as lr, got inf"},
           {make_lion, rate(-1), "parameter group 0: Lion: expected a learning rate"},
           {make_lamb, rate(-1), "parameter group 0: Lamb: expected a learning rate"},
           {make_adafactor, rate(-1), "parameter group 0: Adafactor: expected a learning rate"},
           {make_muon, misspelt, "parameter group 0: Muon: expected adjust_lr_fn"}}) {
    Shard shard(0, 1, c.make, {Layout::kWholeParameters, 256}, at::kFloat, {true, false});
    const auto plain = c.make(initial(at::kFloat));
    auto& groups = plain->param_groups();
    const auto good = groups[0].options().clone();
    c.change(groups[0].options());
    expect_words(error_of([&] { shard.optimizer.groups().push(groups); }), {c.words});
    groups[0].set_options(good->clone());
    shard.optimizer.groups().push(groups);
    shard.optimizer.groups().push(groups);
    // Infinity has a meaning in other options.
    if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&groups[0].options())) {
      sgd->weight_decay(infinity);
      shard.optimizer.groups().push(groups);
    }
  }
}

TEST(ShardOptimizerTest, AStepOfTheInnerOptimizerByTheUserIsNoticedOnce) {
  Shard shard(0, 1, make_sgd, {Layout::kContiguous, 256}, at::kFloat, {false, false});
  shard.set_gradients(0);
  shard.update();
  EXPECT_EQ(shard.optimizer.take_problem(), "");
  const Tensors before = shard.masters();
  shard.optimizer.inner_with_counts().step();
  expect_words(shard.optimizer.take_problem(), {"step() of the inner optimizer"});
  EXPECT_EQ(shard.optimizer.take_problem(), "");
  EXPECT_TRUE(same(shard.masters(), before));
}

TEST(ShardOptimizerTest, MastersAreReadFromWorkingParametersAndWrittenToThem) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    for (const int64_t rank : {0, 1, 2}) {
      Shard shard(rank, 3, make_sgd, {layout, 256}, at::kBFloat16, {true, false});
      Tensors other;
      for (at::Tensor& p : shard.flat.model.values) {
        p.detach().mul_(2);
        other.push_back(p.detach().clone());
      }
      shard.optimizer.read_masters();
      shard.expect_parameters(other, 0);
      for (at::Tensor& p : shard.flat.model.values) p.detach().zero_();
      for (int64_t b = 0; b < shard.flat.buckets(); ++b) {
        shard.arena.publish(b, shard.optimizer.write_working(b));
      }
      shard.expect_parameters(other, 0);
    }
  }
}

TEST(ShardOptimizerTest, BytesAreThoseOfWhatItHolds) {
  const auto bytes = [](Layout layout, c10::ScalarType dtype) {
    Shard shard(0, 2, make_adamw, {layout, 256}, dtype, {true, false});
    EXPECT_EQ(shard.optimizer.state_bytes(), 0);
    shard.set_gradients(0);
    shard.update();
    int64_t numel = 0, rows = 0;
    for (const SegmentTensors& s : shard.optimizer.segments()) numel += s.segment.numel;
    for (int64_t b = 0; b < shard.flat.buckets(); ++b) rows += shard.flat.row_numel(b);
    EXPECT_EQ(shard.optimizer.state_bytes(), 2 * 4 * numel);
    return std::pair(shard.optimizer.master_bytes(), 4 * rows);
  };
  EXPECT_EQ(bytes(Layout::kContiguous, at::kFloat).first, 0);
  const auto [half, half_rows] = bytes(Layout::kContiguous, at::kBFloat16);
  EXPECT_EQ(half, half_rows);
  const auto [per_parameter, rows] = bytes(Layout::kPerParameter, at::kFloat);
  EXPECT_EQ(per_parameter, rows);
}

}  // namespace
}  // namespace zero
