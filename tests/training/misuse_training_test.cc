// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Calls at the wrong time, gradients that cannot be sent, wrong options and arguments. See
// tests/training/misuse.h.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <barrier>
#include <filesystem>
#include <functional>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/warnings.h"
#include "tests/training/misuse.h"

namespace zero {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

INSTANTIATE_TEST_SUITE_P(Stage, AtStage, ::testing::Values(1, 2));

// ---------------------------------------------------------------------
// Calls at the wrong time

TEST_P(AtStage, StepInsideNoSync) {
  expect_survives(
      stage(GetParam()),
      [](Rank& r) {
        {
          auto guard = r.optimizer->no_sync(r.is(1));
          r.backward(1);
          r.refuses_step(1, {"step() inside no_sync", "got an active one", "end its scope first"});
        }
        r.clip_and_step();
      },
      /*world_size=*/3);
}

TEST(MisuseTest, OtherCollectiveCallsInsideNoSync) {
  expect_survives(stage(2), [](Rank& r) {
    {
      auto guard = r.optimizer->no_sync(r.is(0));
      r.backward(1);
      ZeroOptimizer& o = *r.optimizer;
      r.refuses(0, [&] { o.clip_grad_norm_(1.0); }, {"clip_grad_norm_() inside no_sync"});
      r.refuses(0, [&] { o.reduce_gradients(); }, {"reduce_gradients() inside no_sync"});
      r.refuses(0, [&] { o.zero_grad(); }, {"zero_grad() inside no_sync"});
      r.refuses(0, [&] { o.gradient(r.model->scale); }, {"gradient() inside no_sync"});
      r.refuses(0, [&] { o.check_replicas(); }, {"check_replicas() inside no_sync"});
    }
    r.clip_and_step();
  });
}

TEST(MisuseTest, NestedNoSync) {
  expect_survives(stage(2), [](Rank& r) {
    const Words words = {"no_sync inside no_sync", "expected one guard at a time",
                         "let the first go out of scope"};
    if (r.is(1)) {
      auto guard = r.optimizer->no_sync();
      const std::string text = error_soon([&] { auto second = r.optimizer->no_sync(); });
      expect_words(text, words);
      expect_words(text, {"rank 1: "});
    }
    r.backward(1);
    r.refuses(
        1, [&] { r.optimizer->clip_grad_norm_(0.1); }, words);
    r.clip_and_step();
  });
}

TEST_P(AtStage, ALossWithoutAGraphUnderAGuardIsRefused) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    for (const bool inference : {false, true}) {
      if (r.is(1)) {
        const std::string text = error_soon([&] {
          if (inference) {
            at::Tensor loss;
            {
              const c10::InferenceMode mode;
              loss = r.loss(7);
            }
            r.optimizer->backward(loss);
          } else {
            const at::NoGradGuard guard;
            r.backward(7);
          }
        });
        expect_words(text, {"rank 1: loss: expected one that was computed with a graph",
                            "NoGradGuard", "before the forward pass"});
      }
      r.refuses_step(1, {"expected one that was computed with a graph"});
    }
    r.train(1);
  });
}

// Where a guard ended before the pass, a loss looks like that of a rank that drops all layers.
TEST_P(AtStage, StepsWithoutAGradientAreRefusedAfterTenInARow) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    const auto train_nothing = [&](int step) {
      at::Tensor loss;
      {
        const at::NoGradGuard guard;
        loss = r.loss(step);
      }
      r.optimizer->backward(loss);
      r.optimizer->step();
    };
    for (int step = 0; step < 9; ++step) train_nothing(step);
    r.train(1);  // which begins the count again
    for (int step = 0; step < 9; ++step) train_nothing(step);
    expect_words(error_soon([&] { train_nothing(9); }),
                 {"rank " + std::to_string(r.group.rank()) + ": step(): expected a gradient",
                  "10 steps in a row", "NoGradGuard", "zero_grad() on all ranks"});
    r.optimizer->zero_grad();
  });
}

TEST_P(AtStage, BackwardBetweenClipAndStep) {
  for (bool plain : {false, true}) {
    SCOPED_TRACE(plain ? "plain" : "ours");
    expect_survives(stage(GetParam()), [&](Rank& r) {
      const Words words = {"backward() between a clip and step()", "expected step() next",
                           "clip after the last backward pass",
                           "or zero_grad() of the ZeroOptimizer"};
      r.backward(1);
      r.optimizer->clip_grad_norm_(0.1);
      if (r.is(1)) {
        const std::string text = error_soon([&] {
          if (plain) {
            r.loss(7).backward();
          } else {
            r.backward(7);
          }
        });
        expect_words(text, words);
        expect_words(text, {"rank 1: "});
      }
      r.refuses_step(1, words);
      r.optimizer->step();
    });
  }
}

// As in torch, with zeros nowhere: a step then does nothing.
TEST_P(AtStage, ModuleZeroGradOnAllRanksDropsWhatWasSent) {
  for (const bool fp32 : {false, true}) {
    expect_survives(stage(GetParam()).no_sync_fp32(fp32), [](Rank& r) {
      torch::optim::Optimizer& base = *r.optimizer;
      r.model->zero_grad();
      for (const bool reduced : {false, true}) {
        r.backward(7);
        r.loss(8).backward();
        if (reduced) r.optimizer->reduce_gradients();
        reduced ? base.zero_grad() : r.model->zero_grad();
        EXPECT_FALSE(r.optimizer->gradient(r.model->scale).defined());
        EXPECT_EQ(r.optimizer->clip_grad_norm_(1.0).item<double>(), 0);
        r.optimizer->step();
      }
      // Before another pass, which the library sees begin or not.
      r.backward(7);
      r.model->zero_grad();
      r.loss(8).backward();
      r.model->zero_grad();
      {
        auto guard = r.optimizer->no_sync();
        r.backward(9);
        r.model->zero_grad();
        r.backward(10);
      }
      r.model->zero_grad();
      r.optimizer->reduce_gradients();
      r.train(1);
      r.model->zero_grad();
    });
  }
}

TEST_P(AtStage, WhatModuleZeroGradDropsOnAllRanksRefusesNoCallBetweenSteps) {
  const std::string folder =
      ::testing::TempDir() + "/dropped-in-stage-" + std::to_string(GetParam());
  std::filesystem::remove_all(folder);
  expect_survives(stage(GetParam()).ema(EmaOptions()), [&](Rank& r) {
    ZeroOptimizer& o = *r.optimizer;
    const std::vector<at::Tensor> stateless = {r.model->empty};
    const at::Tensor weight = r.model->trunk->weight;
    std::vector<double> norms;
    const auto drop = [&] {
      r.backward(7);
      norms.push_back(o.grad_norm().item<double>());
      r.model->zero_grad();
      r.backward(8);
      r.model->zero_grad();
    };
    const std::vector<std::function<void()>> calls = {
        [&] { o.save_checkpoint(folder); },
        [&] { o.load_checkpoint(folder); },
        [&] { o.freeze(stateless); },
        [&] { o.unfreeze(stateless); },
        [&] {
          o.resize_rows({{weight, at::arange(weight.size(0))}});
        },
        [&] { o.use_ema().end(); }};
    for (const auto& call : calls) {
      drop();
      EXPECT_EQ(error_soon(call), "");
    }
    // Nor is a norm of what was dropped that of the next gradients.
    drop();
    o.master(weight);
    r.backward(9);
    EXPECT_NE(o.grad_norm().item<double>(), norms.back());
    o.zero_grad();
    r.train(1);
  });
}

TEST_P(AtStage, ModuleZeroGradOnOneRankIsRefusedOnAll) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    const Words words = {"rank 1: step() with the gradients of 1 reductions dropped",
                         "zero_grad() of the module", "call zero_grad() of the ZeroOptimizer"};
    for (const bool again : {false, true}) {
      r.backward(7);
      if (r.is(1)) r.model->zero_grad();
      if (again) r.backward(8);
      r.differs([&] { r.optimizer->step(); }, words);
      r.optimizer->zero_grad();
    }
    // What was not sent is this rank's own.
    {
      auto guard = r.optimizer->no_sync();
      r.backward(7);
      r.model->zero_grad();
      if (r.is(1)) r.backward(8);
    }
    if (r.is(1)) r.model->zero_grad();
    r.train(1);
  });
}

TEST_P(AtStage, ZeroGradOfAPartOfTheModuleIsRefused) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    r.backward(7);
    if (r.is(1)) r.model->left->zero_grad();
    r.refuses_step(1, {"parameter left.", "kept or dropped together", "reset by zero_grad()",
                       "zero_grad() of the ZeroOptimizer", "an optimizer each"});
    r.optimizer->zero_grad();
    // With zeros, which no gradient has.
    r.backward(7);
    if (r.is(1)) r.model->zero_grad(/*set_to_none=*/false);
    r.refuses_step(1, {"expected p.grad() as the backward pass left it"});
    r.optimizer->zero_grad();
    r.train(1);
  });
}

TEST_P(AtStage, AGradientPutInThePlaceOfOneThatWasSentIsRefused) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    r.backward(7);
    const at::Tensor& p = r.model->trunk->weight;
    if (r.is(1)) p.mutable_grad() = at::ones_like(p.detach());
    const Words words = {"parameter trunk.weight", "expected p.grad() as the backward pass left it",
                         "clip_grad_norm_() of the ZeroOptimizer", "zero_grad() on all ranks"};
    r.refuses_step(1, words);
    r.refuses(
        1, [&] { r.optimizer->broadcast_buffers(); }, words);
    r.optimizer->zero_grad();
    // Functions of torch that change gradients find none.
    r.backward(7);
    const auto parameters = r.model->parameters();
    EXPECT_NE(error_soon([&] { torch::nn::utils::clip_grad_norm_(parameters, 0.1); }), "");
    EXPECT_NE(error_soon([&] { torch::nn::utils::clip_grad_value_(parameters, 0.1); }), "");
    r.optimizer->zero_grad();
    r.train(1);
  });
}

// One with the strides of the parameter would be read past its end.
TEST_P(AtStage, AGradientOfAnotherShapeIsRefusedByEveryCall) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    const at::Tensor& p = r.model->trunk->weight;
    const Words words = {"gradient of trunk.weight", "expected shape", "got [1, "};
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { r.optimizer->broadcast_buffers(); },
             [&] { r.optimizer->refresh_working_parameters(); },
             [&] { r.optimizer->check_replicas(); }, [&] { r.optimizer->step(); }}) {
      if (r.is(1)) p.mutable_grad() = at::ones_like(p.detach().narrow(0, 0, 1));
      r.refuses(1, call, words);
      p.mutable_grad().reset();
      r.optimizer->zero_grad();
    }
    r.train(1);
  });
}

TEST_P(AtStage, ExceptionInAUsersHook) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    unsigned hook = 0;
    at::Tensor bias = r.model->trunk->bias;
    if (r.is(1)) {
      hook = bias.register_hook(
          [](const at::Tensor&) { throw std::runtime_error("the dog ate this gradient"); });
      expect_words(error_soon([&] { r.backward(7); }), {"the dog ate this gradient"});
      bias.remove_hook(hook);
    } else {
      r.backward(7);
    }
    const Words words = {"a backward pass ended with an exception", "gradients are incomplete",
                         "call zero_grad() on all ranks", "the dog ate this gradient"};
    r.refuses_step(1, words);
    r.refuses(
        1, [&] { r.optimizer->clip_grad_norm_(1.0); }, words);  // until:
    r.optimizer->zero_grad();
    r.train(1);
  });
}

TEST_P(AtStage, WhatIsNoExceptionInAUsersHook) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    if (r.is(1)) {
      const unsigned hook =
          r.model->trunk->bias.register_hook([](const at::Tensor&) -> void { throw 1; });
      EXPECT_THROW(r.backward(7), int);
      r.model->trunk->bias.remove_hook(hook);
    } else {
      r.backward(7);
    }
    r.refuses_step(1, {"a backward pass ended with an exception", "gradients are incomplete",
                       "no std::exception"});
    r.optimizer->zero_grad();
    r.train(1);
  });
}

const Words kTwoThreads = {"expected one at a time", "of two threads at once", "add up the losses",
                           "call zero_grad() on all ranks"};

TEST_P(AtStage, APassBesideOneOfAnotherThreadIsRefused) {
  for (const bool plain : {false, true}) {
    SCOPED_TRACE(plain ? "plain" : "ours");
    expect_survives(stage(GetParam()), [&](Rank& r) {
      // In the middle of a pass. The loss of the other has no such hook.
      std::string text;
      at::Tensor loss = r.loss(7);
      loss.register_hook([&](const at::Tensor&) {
        std::thread other(
            [&] { text = error_soon([&] { plain ? r.loss(8).backward() : r.backward(8); }); });
        other.join();
      });
      if (r.is(1)) {
        r.optimizer->backward(loss);
        expect_words(text, kTwoThreads);
        expect_words(text, {"rank 1: "});
      } else {
        r.backward(7);
      }
      r.refuses_step(1, kTwoThreads);
      r.refuses_step(1, kTwoThreads);  // until:
      r.optimizer->zero_grad();
      r.train(1);
    });
  }
}

// In the middle of a step another thread calls, in the middle of a pass it steps, and it runs plain
// passes in the middle of a step.
TEST(MisuseTest, CallsOfTwoThreadsAtOnceEndTheOptimizer) {
  class InLeavesOut final : public SkipRule {
   public:
    explicit InLeavesOut(std::function<void()> run) : run_(std::move(run)) {}
    at::Tensor leaves_out(const at::Tensor& norm) override {
      run_();
      return norm < 0;
    }
    std::string state() const override { return {}; }
    void set_state(const std::string&) override {}

   private:
    const std::function<void()> run_;
  };
  const Words words = {"expected those of one thread at a time", "of two threads at once",
                       "make all of them in one thread"};
  using Call = std::function<void(ZeroOptimizer&, const at::Tensor& loss)>;
  const std::pair<bool, Call> kCalls[] = {
      {false, [](ZeroOptimizer& o, const at::Tensor&) { o.check_replicas(); }},
      {false, [](ZeroOptimizer& o, const at::Tensor& loss) { o.backward(loss); }},
      {false, [](ZeroOptimizer&, const at::Tensor& loss) { loss.backward(); }},
      {true, [](ZeroOptimizer& o, const at::Tensor&) { o.step(); }},
  };
  for (const int world_size : {1, 2, 3}) {
    for (const auto& [in_pass, call] : kCalls) {
      run_ranks(world_size, [&](const Group& group) {
        torch::nn::Linear model(3, 2);
        const auto loss = [&] { return model->forward(at::ones({1, 3})).sum(); };
        std::unique_ptr<ZeroOptimizer> optimizer;
        std::string text;
        const auto call_elsewhere = [&] {
          if (group.rank() != 0) return;
          std::thread other([&] { text = error_of([&] { call(*optimizer, loss()); }); });
          other.join();
        };
        ZeroOptions options;
        if (!in_pass) options.skip_if(std::make_shared<InLeavesOut>(call_elsewhere));
        optimizer = std::make_unique<ZeroOptimizer>(
            *model,
            std::make_unique<torch::optim::SGD>(model->parameters(), torch::optim::SGDOptions(1)),
            group, options);
        const std::string own = error_of([&] {
          at::Tensor value = loss();
          if (in_pass) {
            value.register_hook([&](const at::Tensor&) { call_elsewhere(); });
          }
          optimizer->backward(value);
          optimizer->step();
          optimizer->step();
        });
        if (group.rank() == 0) expect_words(text, words);
        if (world_size > 1) expect_words(own, words);
      });
    }
  }
}

// Hooks of ours may get the two gradients at once, or one after the other: then their sum is right,
// as torch's is, and the threads try again.
TEST(MisuseTest, GradientsOfTwoThreadsAtOnceAreRefused) {
  struct Large : torch::nn::Module {
    at::Tensor loss() { return (weight * 2).sum(); }
    at::Tensor weight = register_parameter("weight", at::zeros({int64_t{1} << 22}));
  };
  run_ranks(1, [](const Group& group) {
    Large model;
    ZeroOptimizer optimizer(
        model, std::make_unique<torch::optim::SGD>(model.parameters(), torch::optim::SGDOptions(1)),
        group);
    std::barrier<> both(2);
    const unsigned hook =
        model.weight.register_hook([&](const at::Tensor&) { both.arrive_and_wait(); });
    std::string texts[2];
    double steps = 0;
    for (int i = 0; i < 200; ++i) {
      const auto pass = [&](int n) { texts[n] = error_of([&] { model.loss().backward(); }); };
      std::thread other([&] { pass(1); });
      pass(0);
      other.join();
      if (!texts[0].empty() || !texts[1].empty()) break;
      optimizer.step();
      steps += 2;
      EXPECT_TRUE(model.weight.eq(-2 * steps).all().item<bool>());
    }
    expect_words(texts[0] + texts[1], kTwoThreads);
    expect_words(error_of([&] { optimizer.step(); }), kTwoThreads);
    optimizer.zero_grad();
    model.weight.remove_hook(hook);
    model.loss().backward();
    optimizer.step();
    EXPECT_TRUE(model.weight.eq(-2 * (steps + 1)).all().item<bool>());
  });
}

TEST(MisuseTest, WrongMaxNormAndNormType) {
  const double infinity = std::numeric_limits<double>::infinity();
  expect_survives(stage(2), [&](Rank& r) {
    r.backward(1);
    for (double wrong : {0.0, -1.0, kNaN}) {
      const double max_norm = r.is(1) ? wrong : 1.0;
      r.refuses(1, [&] { r.optimizer->clip_grad_norm_(max_norm); },
                {"max_norm: expected a number above 0, got", "pass nullopt to measure only"});
      const double norm_type = r.is(0) ? wrong : 2.0;
      r.refuses(0, [&] { r.optimizer->clip_grad_norm_(1.0, norm_type); },
                {"norm_type: expected a number above 0 or infinity, got"});
    }
    r.refuses(1, [&] { r.optimizer->grad_norm(r.is(1) ? -infinity : infinity); }, {"got -inf"});
    EXPECT_GT(r.optimizer->grad_norm(infinity).item<double>(), 0);
    r.clip_and_step();
  });
}

TEST_P(AtStage, DifferentCallsOnDifferentRanks) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    ZeroOptimizer& o = *r.optimizer;
    r.backward(1);
    r.differs([&] { r.is(0) ? void(o.clip_grad_norm_(0.5)) : void(o.step()); },
              {"rank 0: clip_grad_norm_() with max_norm 0.5, norm_type 2",
               "rank 1: step() with options lr 0.1 momentum 0.9"});
    r.differs([&] { o.clip_grad_norm_(r.is(0) ? 1.0 : 0.999, r.is(0) ? 2.0 : 3.0); },
              {"max_norm 1, norm_type 2", "max_norm 0.999", "norm_type 3"});
    r.differs([&] { o.gradient(r.is(0) ? r.model->scale : r.model->last); },
              {"gradient() with parameter scale", "gradient() with parameter last"});
    r.differs([&] { r.is(0) ? o.check_replicas() : o.broadcast_buffers(); },
              {"check_replicas()", "broadcast_buffers() with counter [1] Long"});
    r.clip_and_step();
  });
}

TEST_P(AtStage, ZeroGradWhereOnlySomeRanksHaveGradients) {
  expect_survives(stage(GetParam()), [](Rank& r) {
    if (r.is(0)) {
      r.backward(7);
    } else {
      r.optimizer->zero_grad();  // there is nothing to forget here: local
      r.backward(8);
    }
    r.differs([&] { r.is(0) ? r.optimizer->zero_grad() : void(r.optimizer->step()); },
              {"rank 0: zero_grad()", "rank 1: step()",
               "zero_grad() is collective on a rank that has gradients", "some ranks had none"});
    r.optimizer->zero_grad();
    r.train(1);
  });
}

// ---------------------------------------------------------------------
// Gradients that cannot be sent

TEST_P(AtStage, SparseGradient) {
  enum Way { kOurs, kPlain, kNoSync };
  for (Way way : {kOurs, kPlain, kNoSync}) {
    SCOPED_TRACE(way);
    expect_survives(stage(GetParam()), [&](Rank& r) {
      const Words words = {"gradient of trunk.weight", "expected a dense tensor",
                           "got layout Sparse",        "build the layer with sparse=false",
                           "Gradients are incomplete", "call zero_grad() on all ranks"};
      {
        auto guard = r.optimizer->no_sync(way == kNoSync);
        if (r.is(1)) {
          const at::Tensor rows = at::embedding(r.model->trunk->weight, at::arange(2), -1, false,
                                                /*sparse=*/true);
          const std::string text = error_soon(
              [&] { way == kPlain ? rows.sum().backward() : r.optimizer->backward(rows.sum()); });
          expect_words(text, words);
          expect_words(text, {"rank 1: "});
        } else {
          r.backward(7);
        }
      }
      r.refuses_step(1, words);
      r.optimizer->zero_grad();
      r.train(1);
    });
  }
}

TEST(MisuseTest, GradientReplacedByHand) {
  expect_survives(stage(2), [](Rank& r) {
    {
      auto guard = r.optimizer->no_sync();
      r.backward(7);
    }
    if (r.is(1)) r.model->scale.mutable_grad() = at::ones({1}).to_sparse();
    r.refuses_step(1, {"gradient of scale", "expected a dense tensor"});
    r.optimizer->zero_grad();
    r.train(1);
  });
}

// ---------------------------------------------------------------------
// Options and arguments

TEST(MisuseTest, InnerOptionsChangedBehindOurBack) {
  expect_survives(stage(2), [](Rank& r) {
    auto& options = static_cast<torch::optim::SGDOptions&>(r.inner->param_groups()[1].options());
    r.backward(1);
    if (r.is(1)) options.lr(5);
    r.refuses_step(1, {"parameter group 1", "expected the inner optimizer's options as they were",
                       "change param_groups()[1].options() of the ZeroOptimizer instead"});
    if (r.is(1)) {
      auto& again = static_cast<torch::optim::SGDOptions&>(r.inner->param_groups()[1].options());
      again.lr(0.1);
    }
    r.clip_and_step();
  });
}

TEST(MisuseTest, OptionsOfAnotherClass) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    auto before = r.optimizer->param_groups()[1].options().clone();
    if (r.is(1)) {
      r.optimizer->param_groups()[1].set_options(std::make_unique<torch::optim::AdamWOptions>(0.1));
    }
    r.refuses_step(1, {"parameter group 1", "options of class"});
    r.optimizer->param_groups()[1].set_options(std::move(before));
    r.clip_and_step();
  });
}

TEST(MisuseTest, AGroupWithoutOptions) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    auto before = r.optimizer->param_groups()[0].options().clone();
    if (r.is(1)) r.optimizer->param_groups()[0].set_options(nullptr);
    r.refuses_step(1, {"parameter group 0: expected options", "got none", "set_options()"});
    r.optimizer->param_groups()[0].set_options(std::move(before));
    r.clip_and_step();
  });
}

TEST(MisuseTest, LearningRateThatDiffersBetweenRanks) {
  expect_survives(stage(2), [](Rank& r) {
    auto& options = r.optimizer->param_groups()[0].options();
    r.backward(1);
    if (r.is(1)) options.set_lr(0.1000001);
    r.differs([&] { r.optimizer->step(); }, {"lr 0.1 ", "lr 0.1000001 "});
    options.set_lr(0.1);
    r.clip_and_step();
  });
}

TEST(MisuseTest, OptionsThatAreNoNumbers) {
  for (const double rate : {kNaN, std::numeric_limits<double>::infinity()}) {
    expect_survives(stage(2), [=](Rank& r) {
      auto& options =
          static_cast<torch::optim::SGDOptions&>(r.optimizer->param_groups()[1].options());
      const double lr = options.lr(), decay = options.weight_decay();
      r.backward(1);
      if (r.is(1)) options.lr(rate);
      r.refuses_step(1, {"parameter group 1: expected a number as lr, got", "param_groups()"});
      options.lr(lr).weight_decay(r.is(0) ? kNaN : decay);
      r.refuses_step(0, {"parameter group 1: expected a number as weight_decay, got nan"});
      options.weight_decay(decay);
      r.clip_and_step();
    });
  }
}

TEST(MisuseTest, GradientAndMasterOfAForeignTensor) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    const auto pick = [&](const at::Tensor& wrong) { return r.is(1) ? wrong : r.model->scale; };
    const Words words = {"expected a parameter of this optimizer", "got", "module.parameters()"};
    for (const at::Tensor& wrong : {at::ones({4, 5}), at::Tensor(), r.model->frozen}) {
      r.refuses(
          1, [&] { r.optimizer->gradient(pick(wrong)); }, words);
      r.refuses(
          1, [&] { r.optimizer->master(pick(wrong)); }, words);
    }
    EXPECT_TRUE(r.optimizer->gradient(r.model->scale).defined());
    r.clip_and_step();
  });
}

TEST(MisuseTest, BackwardFromSomethingThatIsNoLoss) {
  expect_survives(stage(2), [](Rank& r) {
    const Words words = {"loss: expected a tensor of one element, got", "use backward(outputs"};
    r.backward(1);
    if (r.is(1)) {
      const auto error_of_outputs = [&](const at::Tensor& output) {
        return error_soon([&] { r.optimizer->backward({r.loss(1), output}, {}, false); });
      };
      expect_words(error_of_outputs(r.model->scale * at::ones({7})),
                   {"backward(): output 1: expected an output gradient for shape [7]"});
      expect_words(error_of_outputs({}), {"output 1: expected a tensor, got an undefined one"});
      expect_words(error_of_outputs(at::ones({})), {"output 1: expected one that requires"});
      const std::vector<at::Tensor> two(2, at::ones({}));
      for (const std::vector<at::Tensor>& outputs : {{}, std::vector<at::Tensor>{r.loss(1)}}) {
        expect_words(error_soon([&] { r.optimizer->backward(outputs, two, false); }),
                     {"backward(): expected at most one output gradient for each output, got 2 for",
                      "outputs and gradients in one order"});
      }
      expect_words(error_soon([&] { r.optimizer->backward(r.model->last.reshape({22})); }), words);
      expect_words(error_soon([&] { r.optimizer->backward(at::Tensor()); }), words);
    }
    r.refuses_step(1, words);
    // No pass had begun, so that nothing is lost.
    r.clip_and_step();
  });
}

// As Lookahead is, with the parameters in an optimizer of its own.
class Around : public torch::optim::Optimizer {
 public:
  Around(const std::vector<at::Tensor>& parameters, Inner inner, OddModelImpl& model)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                  std::make_unique<torch::optim::SGDOptions>(0.1)),
        within_(make_inner(inner, model)) {}
  at::Tensor step(LossClosure) override { return within_->step(); }

 private:
  const std::unique_ptr<torch::optim::Optimizer> within_;
};

// Its parameters would be stepped with the markers of sent gradients, which are NaN.
TEST(OwnOptimizerTest, OneAroundAnotherOneIsRefused) {
  for (const Inner inner : {Inner::kSgd, Inner::kSgdMomentum, Inner::kAdamW, Inner::kAdam,
                            Inner::kRmsprop, Inner::kAdagrad, Inner::kLion, Inner::kOwn}) {
    for (const int64_t stage : {1, 2}) {
      run_ranks(2, [&](const Group& group) {
        OddModel model(1);
        ZeroOptimizer optimizer(*model,
                                std::make_unique<Around>(model->parameters(), inner, *model), group,
                                ZeroOptions().elementwise(true).stage(stage));
        optimizer.backward(
            model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
        expect_words(error_soon([&] { optimizer.step(); }),
                     {"inner optimizer: expected step() to read the gradients of its "
                      "param_groups() alone, got zero::",
                      "Around", "a class around another optimizer cannot be wrapped"});
        for (const at::Tensor& p : model->parameters()) {
          EXPECT_TRUE(p.isfinite().all().item<bool>());
        }
      });
    }
  }
}

// A class of the user's own that updates other memory than that of param_groups().
enum class Updates { kInPlace, kThroughData, kOwnBuffer, kOtherMemory, kWithRateZero };

class ByHand : public torch::optim::Optimizer {
 public:
  ByHand(const std::vector<at::Tensor>& parameters, Updates updates)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)},
                  std::make_unique<torch::optim::SGDOptions>(
                      updates == Updates::kWithRateZero ? 0.0 : 0.1)),
        updates_(updates),
        buffer_(at::zeros({100})) {}
  at::Tensor step(LossClosure) override {
    at::NoGradGuard no_grad;
    for (at::Tensor& p : param_groups_[0].params()) {
      if (!p.grad().defined()) continue;
      if (updates_ == Updates::kInPlace) p.sub_(p.grad(), 0.1);
      if (updates_ == Updates::kThroughData) p.data().sub_(p.grad(), 0.1);
      if (updates_ == Updates::kOtherMemory) p.set_data(p - p.grad() * 0.1);
      buffer_.sub_(0.1);
    }
    return {};
  }

 private:
  const Updates updates_;
  const at::Tensor buffer_;
};

TEST(OwnOptimizerTest, OneThatUpdatesOtherMemoryThanItsParametersIsNoticed) {
  const auto run = [](Updates updates, int steps, std::string& error) {
    std::mutex mutex;
    int count = 0;
    run_ranks(2, [&](const Group& group) {
      const Warnings warnings;
      OddModel model(1);
      ZeroOptimizer optimizer(*model, std::make_unique<ByHand>(model->parameters(), updates), group,
                              ZeroOptions().elementwise(true));
      const std::string text = error_soon([&] {
        for (int step = 0; step < steps; ++step) {
          optimizer.backward(model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2),
                                         OddModelImpl::kAll));
          optimizer.step();
        }
      });
      const std::lock_guard<std::mutex> lock(mutex);
      if (text.size() > error.size()) error = text;
      for (const std::string& warning : warnings.texts) {
        if (warning.find("have changed no tensor of its param_groups()") != std::string::npos)
          ++count;
      }
    });
    return count;
  };
  std::string error;
  EXPECT_EQ(run(Updates::kInPlace, 12, error), 0);
  EXPECT_EQ(run(Updates::kThroughData, 12, error), 0);
  EXPECT_EQ(run(Updates::kWithRateZero, 12, error), 0);
  EXPECT_EQ(run(Updates::kOwnBuffer, 9, error), 0);
  EXPECT_EQ(run(Updates::kOwnBuffer, 12, error), 2) << "once on each rank";
  EXPECT_EQ(error, "");
  run(Updates::kOtherMemory, 1, error);
  expect_words(error, {"expected step() of zero::", "ByHand", "in place, got other memory"});
}

// Options without get_lr(), as many classes have them; the rate is in what they serialize, or not.
template <bool kSerialized>
struct RateAlone : torch::optim::OptimizerCloneableOptions<RateAlone<kSerialized>> {
  double lr = 0.1;
  void serialize(torch::serialize::OutputArchive& archive) const override {
    if (kSerialized) archive.write("lr", c10::IValue(lr));
  }
  void serialize(torch::serialize::InputArchive&) override {}
};

template <class Options>
class SgdOf : public torch::optim::Optimizer {
 public:
  explicit SgdOf(const std::vector<at::Tensor>& parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(parameters)}, std::make_unique<Options>()) {}
  at::Tensor step(LossClosure) override {
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      const double lr = static_cast<Options&>(group.options()).lr;
      for (const at::Tensor& p : group.params()) {
        if (p.grad().defined()) p.sub_(p.grad(), lr);
      }
    }
    return {};
  }
};

template <class Options>
void step_with_other_rates(const Words& words) {
  run_ranks(2, [&](const Group& group) {
    OddModel model(1);
    ZeroOptimizer optimizer(*model, std::make_unique<SgdOf<Options>>(model->parameters()), group,
                            ZeroOptions().elementwise(true));
    const auto backward = [&] {
      optimizer.backward(
          model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    };
    double& lr = static_cast<Options&>(optimizer.param_groups()[0].options()).lr;
    for (const double rate : {0.1, 0.2}) {
      lr = rate;
      backward();
      optimizer.step();
    }
    backward();
    lr = 0.1 * (1 + group.rank());
    const std::string error = error_soon([&] { optimizer.step(); });
    EXPECT_EQ(error.empty(), words.empty()) << error;
    expect_words(error, words);
  });
}

TEST(OwnOptimizerTest, RatesThatDifferAreFoundWhereTheyCanBeRead) {
  step_with_other_rates<RateAlone<true>>({"step()", "lr 0.1", "lr 0.2"});
  step_with_other_rates<RateAlone<false>>({});
}

}  // namespace
}  // namespace zero
