// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of inner optimizers that this library has never heard of: what they
// bring back, and what is refused. That they bring back every bit on any number of
// ranks, and that a run goes on in every bit, is in checkpoint_test.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/own_optimizer.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

TEST(OwnOptimizerTest, StateAndOptionsOfEveryKindAreStored) {
  const std::string folder = fresh_folder("kinds") + "/a";
  Training t;
  t.inner = Inner::kOwn;
  t.options.elementwise(true).bucket_bytes(300);
  run_ranks(3, [&](const Group& group) {
    CheckpointRun run(t, group, 1);
    auto& options = static_cast<OwnOptions&>(run.optimizer->param_groups()[1].options());
    options.warmup(7).decays(false).betas({0.8, 0.95});
    options.weight_decay(std::numeric_limits<double>::infinity());
    run.train(0, 2);
    run.optimizer->save_checkpoint(folder);
    // Otherwise that both sides agree would say nothing.
    const Snapshot saved = run.snapshot();
    for (const char* kind :
         {"momentum", "sign", "scalar:power", "value:step", "value:product", "value:moved"}) {
      EXPECT_NE(saved.at(std::string(kind) + "/trunk.weight").abs().max().item<double>(), 0)
          << kind;
    }
    EXPECT_EQ(saved.at("value:step/never.weight").max().item<double>(), 0);
    // momentum and sign of every element, power of every segment.
    int64_t bytes = 0;
    for (const auto& item : run.optimizer->inner().state()) {
      const auto& state = static_cast<const OwnState&>(*item.second);
      bytes += 6 * state.momentum().numel() + 8;
    }
    EXPECT_GT(bytes, 0);
    EXPECT_EQ(run.optimizer->memory().optimizer_state, bytes);

    CheckpointRun other(t, group, 5);
    other.optimizer->load_checkpoint(folder);
    const auto& loaded =
        static_cast<const OwnOptions&>(other.optimizer->param_groups()[1].options());
    EXPECT_EQ(loaded.warmup(), 7);
    EXPECT_EQ(loaded.decays(), false);
    EXPECT_EQ(loaded.betas(), std::make_tuple(0.8, 0.95));
    EXPECT_TRUE(std::isinf(loaded.weight_decay()));
    EXPECT_EQ(loaded.lr(), options.lr());
    EXPECT_EQ(differing(saved, other.snapshot()), 0);
  });
}

// A checkpoint has options as doubles, of which one has 53 bits.
TEST(OwnOptimizerTest, AnOptionThatNoDoubleHoldsIsNeverChanged) {
  const std::string folder = fresh_folder("large") + "/a";
  Training t;
  t.inner = Inner::kOwn;
  t.options.elementwise(true);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t large : {(int64_t{1} << 60) + 1, kMost}) {
    run_ranks(2, [&](const Group& group) {
      CheckpointRun run(t, group, 1);
      const auto warmup = [&]() -> auto& {
        return static_cast<OwnOptions&>(run.optimizer->param_groups()[1].options()).warmup();
      };
      warmup() = large;
      run.train(0, 1);
      run.optimizer->save_checkpoint(folder, SaveOptions().overwrite(true));
      run.optimizer->load_checkpoint(folder);
      EXPECT_EQ(warmup(), large);
      warmup() = 7;
      expect_words(error_of([&] { run.optimizer->load_checkpoint(folder); }),
                   {"option warmup", "2^53", "restore_options(false)"});
      EXPECT_EQ(warmup(), 7);
      warmup() = large;
      run.optimizer->freeze({run.model->trunk->bias});
      EXPECT_EQ(warmup(), large);
    });
  }
}

// A learning rate that one rank alone changes would give each shard its own.
TEST(OwnOptimizerTest, RanksAgreeOnTheLearningRateInEachStepAndOnAllOptionsAtConstruction) {
  Training t;
  t.inner = Inner::kOwn;
  t.options.elementwise(true);
  run_ranks(2, [&](const Group& group) {
    CheckpointRun run(t, group, 1);
    run.train(0, 1);
    const auto step = [&] { run.optimizer->step(); };
    auto& options = run.optimizer->param_groups()[0].options();
    const double rate = options.get_lr();
    options.set_lr(group.rank() == 1 ? 2 * rate : rate);
    expect_words(error_of([&] { run.train(1, 2); }),
                 {"expected the same call with the same arguments",
                  "rank 0: step() with options lr ", "rank 1: step() with options lr "});
    options.set_lr(std::numeric_limits<double>::quiet_NaN());
    expect_words(error_of(step), {"parameter group 0: expected a number as lr, got nan"});
    options.set_lr(rate);
    step();
    EXPECT_EQ(run.optimizer->stats().steps, 2);
    run.optimizer->check_replicas();
  });
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    auto own = make_inner(Inner::kOwn, *model);
    auto& inner = *own;
    ZeroOptimizer optimizer(*model, std::move(own), group, t.options);
    inner.param_groups()[0].options().set_lr(7);
    expect_words(error_of([&] { optimizer.step(); }),
                 {"the inner optimizer's options as they were pushed"});
  });
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    auto own = make_inner(Inner::kOwn, *model);
    static_cast<OwnOptions&>(own->param_groups()[0].options()).warmup(3 + group.rank());
    expect_words(
        error_of([&] { ZeroOptimizer optimizer(*model, std::move(own), group, t.options); }),
        {"options of parameter group 0", "warmup 3", "warmup 4"});
  });
}

// What a class of the user's own may keep that no checkpoint can hold.
enum class Habit {
  kNoSerialize,
  kList,
  kRow,
  kNormOfPiece,
  kForgets,
  kReservedName,
  kNameOfAverage,
  kNameOfBuffer,
  kNameOfFrozen,
  kComplex,
  kLazy
};

struct AwkwardState : torch::optim::OptimizerCloneableParamState<AwkwardState> {
  Habit habit = Habit::kForgets;
  double norm = 0;
  at::Tensor sum;

  void serialize(torch::serialize::OutputArchive& archive) const override {
    if (habit == Habit::kNoSerialize) OptimizerParamState::serialize(archive);
    if (habit == Habit::kList) archive.write("list", c10::IValue(std::vector<int64_t>{1, 2}));
    if (habit == Habit::kRow) archive.write("row", c10::IValue(at::ones({1, 2})));
    if (habit == Habit::kNormOfPiece) archive.write("norm", c10::IValue(norm));
    if (habit == Habit::kForgets) archive.write("sum", c10::IValue(sum));
    if (habit == Habit::kReservedName) archive.write("master", c10::IValue(sum));
    if (habit == Habit::kNameOfAverage) archive.write("zero.ema", c10::IValue(sum));
    if (habit == Habit::kNameOfBuffer) archive.write("buffer", c10::IValue(sum));
    if (habit == Habit::kNameOfFrozen) archive.write("frozen", c10::IValue(sum));
    if (habit == Habit::kLazy) archive.write("sum", c10::IValue(sum));
    if (habit == Habit::kComplex) archive.write("sum", c10::IValue(sum.to(at::kComplexFloat)));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    if (habit == Habit::kLazy && archive.try_read("sum", value)) sum = value.toTensor();
  }
};

class Awkward : public torch::optim::Optimizer {
 public:
  Awkward(const std::vector<at::Tensor>& parameters, Habit habit)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                  std::make_unique<torch::optim::SGDOptions>(0.1)),
        habit_(habit) {}
  at::Tensor step(LossClosure) override {
    at::NoGradGuard no_grad;
    for (at::Tensor& p : param_groups_[0].params()) {
      if (!p.grad().defined()) continue;
      if (habit_ == Habit::kLazy && !p.grad().any().item<bool>()) continue;
      auto state = std::make_unique<AwkwardState>();
      state->habit = habit_;
      state->norm = p.grad().norm().item<double>();
      state->sum = p + p.grad();
      p.sub_(p.grad(), 0.1);
      state_[p.unsafeGetTensorImpl()] = std::move(state);
    }
    return {};
  }

 private:
  const Habit habit_;
};

// Options that can be set `sets` times.
thread_local int sets = 1 << 20;
struct TiringOptions : torch::optim::OptimizerCloneableOptions<TiringOptions> {
  void serialize(torch::serialize::InputArchive& archive) override {
    TORCH_CHECK(sets-- > 0, "tired of options");
    c10::IValue value;
    archive.read("lr", value);
    lr = value.toDouble();
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr));
  }
  double get_lr() const override { return lr; }
  void set_lr(double value) override { lr = value; }
  double lr = 0.1;
};
class Tiring : public torch::optim::Optimizer {
 public:
  explicit Tiring(const std::vector<at::Tensor>& parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                  std::make_unique<TiringOptions>()) {}
  at::Tensor step(LossClosure) override { return {}; }
};

// What no rank can know before: the load has begun on all of them.
TEST(OwnOptimizerTest, ALoadThatFailsHalfWayOnOneRankClosesTheOptimizerOnAll) {
  const std::string folder = fresh_folder("tired") + "/a";
  run_ranks(3, [&](const Group& group) {
    OddModel model(1);
    ZeroOptimizer optimizer(*model, std::make_unique<Tiring>(model->parameters()), group,
                            ZeroOptions().elementwise(true));
    optimizer.save_checkpoint(folder);
    sets = group.rank() == 1 ? 1 : 1 << 20;  // the first is a trial
    expect_words(error_of([&] { optimizer.load_checkpoint(folder); }),
                 {group.rank() == 1 ? "tired of options" : "rank"});
    sets = 1 << 20;
    expect_words(error_of([&] { optimizer.save_checkpoint(folder + "b"); }), {"tired of options"});
  });
}

TEST(OwnOptimizerTest, StateThatCannotBeCutIsRefusedOnAllRanks) {
  const std::vector<std::pair<Habit, std::vector<std::string>>> cases = {
      {Habit::kNoSerialize, {"Awkward", "overrides serialize()"}},
      {Habit::kList, {"state list of", "Awkward", "a tensor, an int, a double or a bool"}},
      {Habit::kRow, {"state row of", "one value for each element", "[1, 2]"}},
      {Habit::kNormOfPiece, {"value:norm for all its pieces", "every element by itself"}},
      {Habit::kReservedName, {"state master of", "another name"}},
      {Habit::kNameOfAverage, {"state zero.ema of", "another name"}},
      {Habit::kNameOfBuffer, {"state buffer of", "another name"}},
      {Habit::kNameOfFrozen, {"state frozen of", "another name"}},
      {Habit::kComplex, {"state sum", "dtype that safetensors has", "ComplexFloat"}},
      {Habit::kForgets, {"Awkward", "to read what it wrote"}},
  };
  for (const auto& [habit, expected] : cases) {
    const std::string parent = fresh_folder("own");
    run_ranks(3, [&, habit = habit, &expected = expected](const Group& group) {
      OddModel model(1);
      const auto step = [&](ZeroOptimizer& optimizer) {
        optimizer.backward(model->loss(random_tensor({3, 17}, group.rank()),
                                       random_tensor({3, 11}, 2), OddModelImpl::kAll));
        optimizer.step();
      };
      ZeroOptimizer optimizer(*model, std::make_unique<Awkward>(model->parameters(), habit), group,
                              ZeroOptions().elementwise(true).bucket_bytes(300));
      step(optimizer);
      const std::string error = error_of([&] {
        optimizer.save_checkpoint(parent + "/a");
        optimizer.load_checkpoint(parent + "/a");
      });
      expect_words(error, expected);
      step(optimizer);  // the optimizer still works
    });
    const auto entries = std::distance(fs::directory_iterator(parent), fs::directory_iterator());
    EXPECT_EQ(entries, habit == Habit::kForgets ? 1 : 0);
  }
}

// A parameter of eight elements for each of `ranks`, and one that is 0-dim.
struct SmallModelImpl : torch::nn::Module {
  explicit SmallModelImpl(int64_t ranks)
      : rows(register_parameter("rows", at::ones({ranks, 8}))),
        scale(register_parameter("scale", at::ones({}))) {}
  at::Tensor rows, scale;
};
TORCH_MODULE(SmallModel);

std::vector<at::Tensor> sums_of(const ZeroOptimizer& optimizer) {
  std::vector<at::Tensor> sums;
  for (const at::Tensor& p : optimizer.inner().param_groups()[0].params()) {
    const auto found = optimizer.inner().state().find(p.unsafeGetTensorImpl());
    if (found == optimizer.inner().state().end()) continue;
    sums.push_back(static_cast<const AwkwardState&>(*found->second).sum);
  }
  return sums;
}

// Of a row whose gradient is zero an optimizer may keep nothing. A load could not tell where.
TEST(OwnOptimizerTest, StateOfSomeElementsOnlyIsRefusedOnAllRanksUntilAllHaveIt) {
  const std::string parent = fresh_folder("lazy");
  const auto optimizer_of = [](SmallModel& model, const Group& group) {
    return ZeroOptimizer(*model, std::make_unique<Awkward>(model->parameters(), Habit::kLazy),
                         group, ZeroOptions().elementwise(true));
  };
  run_ranks(4, [&](const Group& group) {
    SmallModel model(4);
    ZeroOptimizer optimizer = optimizer_of(model, group);
    optimizer.backward(model->rows[0].sum() * model->scale);
    optimizer.step();
    expect_words(error_of([&] { optimizer.save_checkpoint(parent + "/a"); }),
                 {"parameter rows", "expected sum of all its ", "every element by itself"});
    optimizer.backward(model->rows.sum() * model->scale);
    optimizer.step();
    optimizer.save_checkpoint(parent + "/a");
  });
  run_ranks(2, [&](const Group& group) {
    SmallModel model(4);
    ZeroOptimizer optimizer = optimizer_of(model, group);
    optimizer.load_checkpoint(parent + "/a");
    EXPECT_FALSE(sums_of(optimizer).empty());
  });
  const auto entries = std::distance(fs::directory_iterator(parent), fs::directory_iterator());
  EXPECT_EQ(entries, 1);
}

TEST(OwnOptimizerTest, AParameterWithoutDimensionsGoesOnInAnyLayout) {
  const auto layout_of = [](bool whole) {
    return ZeroOptions().elementwise(true).layout(whole ? Layout::kWholeParameters
                                                        : Layout::kContiguous);
  };
  for (const bool saved_whole : {false, true}) {
    for (const bool loaded_whole : {false, true}) {
      const std::string folder = fresh_folder("scalar") + "/a";
      run_ranks(2, [&](const Group& group) {
        const auto train = [&](bool whole, const std::function<void(ZeroOptimizer&)>& between) {
          SmallModel model(1);
          ZeroOptimizer optimizer(*model,
                                  std::make_unique<OwnOptimizer>(
                                      std::vector<torch::optim::OptimizerParamGroup>{
                                          torch::optim::OptimizerParamGroup(model->parameters())},
                                      OwnOptions(0.1)),
                                  group, layout_of(whole));
          const auto step = [&] {
            optimizer.backward(model->rows.sum() * model->scale * model->scale);
            optimizer.step();
          };
          step();
          between(optimizer);
          step();
          return std::pair(model->rows.detach().clone(), model->scale.detach().clone());
        };
        const auto saved = train(saved_whole, [&](ZeroOptimizer& o) { o.save_checkpoint(folder); });
        const auto loaded =
            train(loaded_whole, [&](ZeroOptimizer& o) { o.load_checkpoint(folder); });
        EXPECT_TRUE(at::equal(saved.first, loaded.first));
        EXPECT_TRUE(at::equal(saved.second, loaded.second));
      });
    }
  }
}

}  // namespace
}  // namespace zero
