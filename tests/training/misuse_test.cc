// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Promise 8 of zero/zero_optimizer.h: misuse is an error on the rank where it
// is seen and on every rank at its next collective call, says expected, got,
// remedy and rank, and sends nothing. And nothing is lost: training goes on
// afterwards with the bits it would have had.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Far below the groups' timeout: nobody may learn of misuse by waiting for it.
constexpr std::chrono::seconds kSoon{5};

// What `action` throws, and soon; without a backtrace, empty if nothing.
std::string error_soon(const std::function<void()>& action) {
  const auto start = Clock::now();
  std::string text;
  try {
    action();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_LT(Clock::now() - start, kSoon) << text;
  return text;
}

// One rank's model and optimizer, and the training that all tests do.
struct Rank {
  explicit Rank(const Group& group, const ZeroOptions& options = {}) : group(group) {
    auto sgd = make_inner(Inner::kSgdMomentum, *model);
    inner = sgd.get();
    optimizer = std::make_unique<ZeroOptimizer>(*model, std::move(sgd), group, options);
  }

  bool is(int rank) const { return group.rank() == rank; }
  at::Tensor loss(int step) {
    const auto seed = static_cast<uint64_t>(100 * step + group.rank());
    return model->loss(random_tensor({3, 17}, seed), random_tensor({3, 11}, seed + 50),
                       OddModelImpl::kAll);
  }
  void backward(int step) { optimizer->backward(loss(step)); }
  void clip_and_step() {
    optimizer->clip_grad_norm_(0.1);
    optimizer->step();
  }
  void train(int step) {
    backward(step);
    clip_and_step();
  }

  // `call` throws on every rank and sends no data. All ranks read `words`; those
  // that did nothing wrong also read whose fault it is.
  void refuses(int culprit, const std::function<void()>& call, const Words& words) {
    const std::string text = error_without_data(call);
    expect_words(text, words);
    expect_words(text, {"rank " + std::to_string(group.rank()) + ": "});
    if (!is(culprit)) {
      expect_words(text, {"given up by all ranks because of rank " + std::to_string(culprit)});
    }
  }
  void refuses_step(int culprit, const Words& words) {
    refuses(
        culprit, [this] { optimizer->step(); }, words);
  }
  // The ranks' calls differ: everybody reads what everybody called.
  void differs(const std::function<void()>& call, const Words& words) {
    const std::string text = error_without_data(call);
    expect_words(text, words);
    expect_words(text, {"rank " + std::to_string(group.rank()) + ": expected the same call",
                        "\n  rank 0: ", "\n  rank 1: ", "in the same order"});
  }
  // What backward passes sent may still be on its way, but nothing is added to it.
  std::string error_without_data(const std::function<void()>& call) {
    const Stats before = optimizer->stats();
    const std::string text = error_soon(call);
    const Stats after = optimizer->stats();
    EXPECT_EQ(before.rounds, after.rounds) << text;
    EXPECT_EQ(before.data.gather_calls, after.data.gather_calls) << text;
    EXPECT_EQ(before.data.small_calls, after.data.small_calls) << text;
    return text;
  }

  const Group group;
  OddModel model{1};
  torch::optim::Optimizer* inner;
  std::unique_ptr<ZeroOptimizer> optimizer;
};

ZeroOptions stage(int64_t number) { return ZeroOptions().stage(number).bucket_bytes(600); }

// Trains step 0, calls `body`, which trains step 1 and does something wrong
// beside it, and trains step 2. The parameters must then have the bits that
// training without misuse gives.
void expect_survives(const ZeroOptions& options, const std::function<void(Rank&)>& body,
                     int world_size = 2) {
  SCOPED_TRACE("stage " + std::to_string(options.stage()));
  const auto train = [&](const std::function<void(Rank&)>& middle) {
    Trajectory trajectory(static_cast<size_t>(world_size));
    run_ranks(world_size, [&](const Group& group) {
      Rank rank(group, options);
      rank.train(0);
      middle(rank);
      rank.train(2);
      rank.optimizer->check_replicas();
      for (const at::Tensor& p : rank.model->parameters()) {
        trajectory[group.rank()].push_back(p.detach().clone());
      }
    });
    return trajectory;
  };
  const Trajectory clean = train([](Rank& rank) { rank.train(1); });
  EXPECT_EQ(differing_elements(train(body), clean), 0);
}

class AtStage : public ::testing::TestWithParam<int64_t> {};
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

TEST_P(AtStage, BackwardBetweenClipAndStep) {
  for (bool plain : {false, true}) {
    SCOPED_TRACE(plain ? "plain" : "ours");
    expect_survives(stage(GetParam()), [&](Rank& r) {
      const Words words = {"backward() between clip_grad_norm_() and step()",
                           "expected step() next", "clip after the last backward pass"};
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

TEST_P(AtStage, ModuleZeroGradBetweenBackwardAndStep) {
  // Of gradients that wait for their sum under no_sync it is seen.
  expect_survives(stage(GetParam()), [](Rank& r) {
    {
      auto guard = r.optimizer->no_sync();
      r.backward(7);
      if (r.is(1)) r.model->zero_grad();
    }
    r.refuses_step(1, {"parameter scale", "expected the gradient that was accumulated", "got none",
                       "reset by zero_grad() of the module", "use ZeroOptimizer::zero_grad()"});
    r.optimizer->zero_grad();
    r.train(1);
  });
  // Of gradients that were sent it has no effect.
  expect_survives(stage(GetParam()), [](Rank& r) {
    r.model->zero_grad();
    r.backward(1);
    r.model->zero_grad();
    r.clip_and_step();
    r.model->zero_grad();
  });
}

TEST(MisuseTest, BaseClassZeroGradOnAveragedGradients) {
  expect_survives(stage(1), [](Rank& r) {
    r.backward(1);
    r.optimizer->reduce_gradients();
    torch::optim::Optimizer& base = *r.optimizer;
    std::vector<at::Tensor> averages;
    for (const at::Tensor& p : r.model->parameters()) averages.push_back(p.grad());
    if (r.is(0)) base.zero_grad();
    r.refuses_step(0, {"parameter scale", "cannot reset what was sent"});
    // Put back, nothing has happened.
    const auto parameters = r.model->parameters();
    for (size_t i = 0; i < averages.size(); ++i) parameters[i].mutable_grad() = averages[i];
    r.clip_and_step();
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
// Parameters changed behind our back

TEST(MisuseTest, ParameterGroupAddedOrChangedAfterConstruction) {
  expect_survives(stage(2), [](Rank& r) {
    torch::optim::Optimizer& base = *r.optimizer;
    const Words words = {"groups of construction", "added, removed or changed afterwards",
                         "make a new optimizer"};
    r.backward(1);
    if (r.is(1)) base.add_param_group(torch::optim::OptimizerParamGroup({at::ones({3})}));
    r.refuses_step(1, words);
    r.refuses_step(1, {"parameter group 2", "expected the 2 groups", "got 3", "(1 parameters)"});
    if (r.is(1)) base.param_groups().pop_back();
    if (r.is(0)) base.add_parameters({at::ones({3})});
    r.refuses_step(0, words);
    auto& members = base.param_groups()[0].params();
    if (r.is(0)) members.pop_back();
    // As many as before, but others.
    const at::Tensor first = members[0];
    if (r.is(1)) members[0] = at::ones({3});
    r.refuses_step(1, words);
    members[0] = first;
    r.clip_and_step();
  });
}

TEST(MisuseTest, UnfrozenAfterConstruction) {
  expect_survives(stage(2), [](Rank& r) {
    if (r.is(1)) {
      r.model->frozen.requires_grad_(true);
      r.model->frozen.sum().backward();
    }
    r.backward(1);
    r.refuses_step(1, {"parameter frozen", "expected it to stay without gradients",
                       "got requires_grad and a gradient", "make a new optimizer"});
    r.model->frozen.requires_grad_(false);
    r.model->frozen.mutable_grad().reset();
    r.clip_and_step();
  });
}

TEST(MisuseTest, FrozenAfterConstruction) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    if (r.is(1)) r.model->left->bias.requires_grad_(false);
    r.refuses_step(1, {"parameter left.bias", "expected requires_grad as at construction",
                       "got a frozen one", "make a new optimizer"});
    r.model->left->bias.requires_grad_(true);
    r.clip_and_step();
  });
}

// What another optimizer trains is none of our business.
TEST(MisuseTest, AnotherOptimizersParametersMayHaveGradients) {
  run_ranks(2, [](const Group& group) {
    OddModel model{1};
    const std::vector<at::Tensor> ours = model->trunk->parameters();
    ZeroOptimizer optimizer(*model, std::make_unique<torch::optim::SGD>(ours, 0.1), group);
    torch::optim::SGD theirs(model->left->parameters(), 0.1);
    optimizer.backward(
        model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
    EXPECT_TRUE(model->left->weight.grad().defined());
    optimizer.step();
    theirs.step();
    EXPECT_EQ(optimizer.stats().steps, 1);
  });
}

TEST(MisuseTest, ParameterReassigned) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    torch::nn::Linear old = r.model->never;
    if (r.is(1)) r.model->replace_module("never", torch::nn::Linear(5, 3));
    r.refuses_step(1, {"parameter never.weight", "the tensor that was registered at construction",
                       "holds another in its place", "make a new optimizer"});
    if (r.is(1)) r.model->replace_module("never", old);
    r.clip_and_step();
  });
}

TEST_P(AtStage, MovedToAnotherDtype) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      r.backward(1);
      const Words words = {"parameter scale", "expected dtype Float as at construction",
                           "got BFloat16", "move it back"};
      if (r.is(1)) r.model->to(at::kBFloat16);
      r.refuses_step(1, words);
      r.refuses(
          1, [&] { r.optimizer->master(r.model->scale); }, words);
      r.refuses(
          1, [&] { r.optimizer->refresh_master_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->refresh_working_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->check_replicas(); }, words);
      if (r.is(1)) r.model->to(at::kFloat);
      r.refuses_step(1, {"parameter scale", "expected the storage the last step left",
                         "got another", "call refresh_master_parameters()"});
      r.optimizer->refresh_master_parameters();
      r.clip_and_step();
    });
  }
}

// What module.to(device) leaves behind, made without the device: nothing may read its memory.
at::Tensor as_if_on_gpu(const at::Tensor& tensor) {
  const at::Device gpu(at::kCUDA, 0);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.nbytes(), c10::DataPtr(nullptr, gpu),
                       nullptr, false);
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_contiguous(tensor.sizes());
  return result;
}

TEST_P(AtStage, MovedToAnotherDevice) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      r.backward(1);
      const Words words = {"parameter scale", "expected device cpu as at construction",
                           "got cuda:0", "move it back", "refresh_master_parameters()"};
      const at::Tensor there = r.model->scale.detach().clone();
      if (r.is(1)) r.model->scale.set_data(as_if_on_gpu(there));
      r.refuses_step(1, words);
      r.refuses(
          1, [&] { r.optimizer->clip_grad_norm_(1.0); }, words);
      r.refuses(
          1, [&] { r.optimizer->master(r.model->scale); }, words);
      r.refuses(
          1, [&] { r.optimizer->refresh_master_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->check_replicas(); }, words);
      if (r.is(1)) r.model->scale.set_data(there);
      r.refuses_step(1, {"parameter scale", "expected the storage the last step left",
                         "got another", "call refresh_master_parameters()"});
      r.optimizer->refresh_master_parameters();
      r.clip_and_step();
    });
  }
}

TEST_P(AtStage, ShapeReplaced) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      at::Tensor scale = r.model->scale;
      const at::Tensor old = scale.detach();
      const Words words = {"scale",    "expected shape [1] as at construction",
                           "got [11]", "give",
                           "back",     "its shape"};
      if (r.is(1)) {
        scale.set_data(at::ones({11}));
        expect_words(error_soon([&] { r.backward(7); }), words);
      }
      r.refuses_step(1, words);
      r.optimizer->zero_grad();
      r.refuses(
          1, [&] { r.optimizer->refresh_master_parameters(); }, words);
      r.refuses(
          1, [&] { r.optimizer->check_replicas(); }, words);
      if (r.is(1)) scale.set_data(old.clone());
      r.refuses_step(1, {"scale", "expected the storage"});
      r.optimizer->refresh_master_parameters();
      r.train(1);
    });
  }
}

TEST_P(AtStage, LoadedOver) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    expect_survives(stage(GetParam()).layout(layout), [](Rank& r) {
      std::stringstream saved;
      torch::save(r.model, saved);
      r.backward(1);
      if (r.is(1)) torch::load(r.model, saved);
      r.refuses_step(1, {"parameter scale", "expected the storage the last step left",
                         "torch::load", "call refresh_master_parameters()"});
      r.optimizer->refresh_master_parameters();
      r.clip_and_step();
    });
  }
}

TEST(MisuseTest, EditedInPlace) {
  expect_survives(stage(2), [](Rank& r) {
    r.backward(1);
    at::NoGradGuard no_grad;
    const at::Tensor old = r.model->last.clone();
    if (r.is(1)) r.model->last.add_(1);
    r.refuses_step(1, {"parameter last", "expected the values the last step left", "got version",
                       "edited in place", "call refresh_master_parameters()"});
    r.model->last.copy_(old);
    r.optimizer->refresh_master_parameters();
    r.clip_and_step();
  });
}

TEST(MisuseTest, EveryCallThatReadsParametersSeesAnEdit) {
  expect_survives(stage(2), [](Rank& r) {
    at::Tensor& edited = r.model->last;
    const at::Tensor old = edited.detach().clone();
    const auto set = [&](const at::Tensor& value) {
      const at::NoGradGuard no_grad;
      if (r.is(1)) edited.copy_(value);
    };
    const auto refuses_all = [&](const std::vector<std::function<void()>>& calls) {
      set(old + 1);
      for (const auto& call : calls) r.refuses(1, call, {"parameter last", "edited in place"});
      set(old);
      r.optimizer->refresh_master_parameters();
    };
    refuses_all({[&] { r.optimizer->save_checkpoint(::testing::TempDir() + "/never"); }});
    r.backward(1);
    refuses_all({[&] { r.optimizer->master(r.model->scale); },
                 [&] { r.optimizer->gradient(r.model->scale); },
                 [&] { r.optimizer->reduce_gradients(); }, [&] { r.optimizer->grad_norm(); },
                 [&] { r.optimizer->step(); }});
    r.clip_and_step();
  });
}

TEST(MisuseTest, BuffersThatDiffer) {
  expect_survives(stage(2), [](Rank& r) {
    if (r.is(1)) r.model->counter.set_data(at::zeros({5}, at::kLong));
    r.differs([&] { r.optimizer->broadcast_buffers(); }, {"counter [1] Long", "counter [5] Long"});
    if (r.is(1)) r.model->counter.set_data(at::zeros({1}, at::kLong));
    r.optimizer->broadcast_buffers();
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
                           "got layout Sparse", "build the layer with sparse=false",
                           "call zero_grad() on all ranks"};
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

TEST(MisuseTest, TorchSaveOfTheOptimizer) {
  expect_survives(stage(2), [](Rank& r) {
    std::stringstream stream;
    const std::string rank = "rank " + std::to_string(r.group.rank()) + ": ";
    expect_words(error_soon([&] { torch::save(*r.optimizer, stream); }),
                 {rank, "expected save_checkpoint()"});
    torch::save(r.model, stream);
    expect_words(error_soon([&] { torch::load(*r.optimizer, stream); }),
                 {rank, "expected load_checkpoint()"});
    r.train(1);
  });
}

TEST(MisuseTest, BackwardFromSomethingThatIsNoLoss) {
  expect_survives(stage(2), [](Rank& r) {
    const Words words = {"loss: expected a 0-dim tensor, got", "use backward(outputs"};
    if (r.is(1)) {
      expect_words(error_soon([&] { r.optimizer->backward(r.model->last.reshape({22})); }), words);
      expect_words(error_soon([&] { r.optimizer->backward(at::Tensor()); }), words);
    }
    r.refuses_step(1, words);
    r.optimizer->zero_grad();
    r.train(1);
  });
}

// ---------------------------------------------------------------------
// Construction

struct Ingredients {
  OddModel model{1};
  std::unique_ptr<torch::optim::Optimizer> inner = make_inner(Inner::kAdamW, *model);
  ZeroOptions options;
  std::unique_ptr<ZeroOptimizer> earlier;  // must outlive the attempt

  void optimize(std::vector<at::Tensor> parameters) {
    inner = std::make_unique<torch::optim::AdamW>(std::move(parameters), 0.01);
  }
};
using Spoil = std::function<void(Ingredients&, const Group&)>;

// Rank `culprit` of 3 makes its optimizer from what `spoil` left. Returns what
// each rank read. A correct optimizer on the same group then works.
Words construction_errors(int culprit, const Spoil& spoil) {
  Words texts(3);
  run_ranks(3, [&](const Group& group) {
    {
      Ingredients in;
      if (group.rank() == culprit) spoil(in, group);
      texts[group.rank()] = error_soon(
          [&] { ZeroOptimizer optimizer(*in.model, std::move(in.inner), group, in.options); });
    }
    Rank rank(group);
    rank.train(0);
    EXPECT_EQ(rank.optimizer->stats().steps, 1);
  });
  return texts;
}

void expect_unusable(const Spoil& spoil, const Words& words) {
  const Words texts = construction_errors(1, spoil);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    expect_words(texts[rank], words);
    expect_words(texts[rank], {"rank " + std::to_string(rank) + ": "});
    if (rank != 1) {
      expect_words(texts[rank], {"not made on any rank because of:", "\n  rank 1: "});
    }
  }
}

void expect_differs(const Spoil& spoil, const std::string& first, const std::string& second) {
  const Words texts = construction_errors(2, spoil);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    expect_words(texts[rank], {"rank " + std::to_string(rank) + ": ", "expected the same model",
                               "the first difference is\n  rank 0: ", first, "\n  rank 2: ", second,
                               "build the model alike on all ranks"});
    EXPECT_EQ(texts[rank].find("\n  rank 1: "), std::string::npos) << texts[rank];
  }
}

TEST(ConstructionTest, StageZeroAndThreeAndOtherOptions) {
  for (int64_t wrong : {int64_t{0}, int64_t{3}}) {
    expect_unusable([&](Ingredients& in, const Group&) { in.options.stage(wrong); },
                    {"stage: expected 1 or 2, got " + std::to_string(wrong),
                     "stage 0 is plain data parallelism", "stage 3"});
  }
  expect_unusable([](Ingredients& in, const Group&) { in.options.bucket_bytes(-1); },
                  {"bucket_bytes: expected 0 or more, got -1"});
  expect_unusable([](Ingredients& in, const Group&) { in.options.reduce_dtype(at::kDouble); },
                  {"reduce_dtype: expected float, bfloat16 or half, got Double"});
}

TEST(ConstructionTest, LbfgsIsRefusedWithOrWithoutAClosure) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner = std::make_unique<torch::optim::LBFGS>(in.model->parameters());
        in.options.elementwise(true);
      },
      {"expected one that treats every element by itself, got LBFGS", "closure", "Use AdamW"});
}

// p -= sign(grad) / 64
class SignDescent : public torch::optim::Optimizer {
 public:
  explicit SignDescent(std::vector<at::Tensor> parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(0.1)) {}
  at::Tensor step(LossClosure) override {
    at::NoGradGuard no_grad;
    for (at::Tensor& p : param_groups()[0].params()) {
      if (p.grad().defined()) p.sub_(p.grad().sign(), 1.0 / 64);
    }
    return {};
  }
};

TEST(ConstructionTest, UnknownOptimizerNeedsTheUsersWord) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner = std::make_unique<SignDescent>(in.model->parameters());
      },
      {"expected AdamW, Adam, SGD, RMSprop or Adagrad", "SignDescent",
       "say so with ZeroOptions().elementwise(true)"});
  run_ranks(2, [](const Group& group) {
    OddModel model{1}, plain{1};
    ZeroOptimizer optimizer(*model, std::make_unique<SignDescent>(model->parameters()), group,
                            ZeroOptions().elementwise(true));
    SignDescent reference(plain->parameters());
    const auto loss = [](OddModel& m) {
      return m->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll);
    };
    optimizer.backward(loss(model));
    optimizer.step();
    loss(plain).backward();
    reference.step(nullptr);
    EXPECT_EQ(differing_elements({model->parameters()}, {plain->parameters()}), 0);
  });
}

TEST(ConstructionTest, StateThatIsNotEmpty) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll)
            .backward();
        in.inner->step();
      },
      {"expected no state yet, got", "Make a new one", "load_checkpoint()"});
  expect_unusable([](Ingredients& in, const Group&) { in.inner = nullptr; },
                  {"inner optimizer: expected one, got a null pointer"});
}

TEST(ConstructionTest, ParametersThatCannotBeSharded) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        auto parameters = in.model->parameters();
        parameters.push_back(parameters[1]);
        in.optimize(parameters);
      },
      {"parameter", "expected once, given again in group 0", "give every parameter to one group"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->register_parameter("s", at::eye(3).to_sparse());
        in.optimize(in.model->parameters());
      },
      {"parameter s: expected a dense (strided) tensor, got layout Sparse", "use a dense one"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->register_parameter("c", at::ones({3}, at::kComplexFloat));
        in.optimize(in.model->parameters());
      },
      {"parameter c: expected a real dtype, got ComplexFloat", "real and imaginary parts"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.model->to(at::kDouble);
        in.optimize(in.model->parameters());
      },
      {"expected dtype float, bfloat16 or half, got Double", "module.to(dtype)"});
  // torch refuses non-leaf tensors itself, unless they become so afterwards.
  expect_unusable([](Ingredients& in,
                     const Group&) { in.model->frozen.mul_(at::ones({7}).requires_grad_(true)); },
                  {"parameter frozen: expected a leaf tensor, got the result of an operation",
                   "module.parameters()"});
  expect_unusable(
      [](Ingredients& in, const Group&) { in.optimize({at::ones({4}).requires_grad_()}); },
      {"expected a parameter of the module, got a tensor that is not registered",
       "register it or leave it to another optimizer"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.options.layout(Layout::kPerParameter);
        in.model->last.set_data(at::ones({1, 11, 1, 4}).slice(3, 0, 4, 2));
      },
      {"parameter last: expected dense memory, got strides", "use Layout::kContiguous"});
}

TEST(ConstructionTest, ParametersElsewhereThanWhereTheDataTravels) {
  const Group group(c10::make_intrusive<c10d::HashStore>(), 0, 1, "gpu", nullptr,
                    at::Device(at::kCUDA, 0), std::chrono::seconds(30));
  OddModel model(1);
  const std::string text =
      error_soon([&] { ZeroOptimizer(*model, make_inner(Inner::kSgd, *model), group); });
  expect_words(text, {"rank 0: ", "parameters: expected them on cuda:0", "got cpu",
                      "to(group.device()) on the model"});
}

TEST(ConstructionTest, EmptyGroupAndNothingToOptimize) {
  expect_unusable(
      [](Ingredients& in, const Group&) {
        in.inner->add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>()));
      },
      {"parameter group 2: expected at least one parameter, got an empty group",
       "leave the group out"});
  expect_unusable(
      [](Ingredients& in, const Group&) {
        for (at::Tensor& p : in.model->parameters()) p.requires_grad_(false);
      },
      {"nothing to optimize", "got 12 frozen ones", "unfreeze some"});
  run_ranks(2, [](const Group& group) {
    expect_words(error_soon([&] { group.subgroup({}, "nobody"); }),
                 {"subgroup \"nobody\"", "expected different ranks in [0, 2)"});
  });
}

TEST(ConstructionTest, ParametersOfAnotherZeroOptimizer) {
  run_ranks(2, [](const Group& group) {
    Rank rank(group);
    const std::string text = error_soon(
        [&] { ZeroOptimizer second(*rank.model, make_inner(Inner::kAdamW, *rank.model), group); });
    expect_words(text, {"rank " + std::to_string(group.rank()), "parameter scale",
                        "can belong to one ZeroOptimizer at a time"});
    rank.train(0);  // the first is none the worse
    EXPECT_EQ(rank.optimizer->stats().steps, 1);
  });
}

TEST(ConstructionTest, ModelsAndOptionsThatDiffer) {
  expect_differs(
      [](Ingredients& in, const Group&) {
        in.model = OddModel(1, 24);
        in.inner = make_inner(Inner::kAdamW, *in.model);
      },
      "parameter trunk.weight shape [23, 17]", "parameter trunk.weight shape [24, 17]");
  expect_differs([](Ingredients& in, const Group&) { in.model->to(at::kBFloat16); }, "dtype Float",
                 "dtype BFloat16");
  expect_differs([](Ingredients& in, const Group&) { in.options.stage(1); }, "options stage 2",
                 "options stage 1");
  expect_differs([](Ingredients& in, const Group&) { in.options.check_replicas_every(3); },
                 "check_replicas_every 0", "check_replicas_every 3");
  expect_differs([](Ingredients& in,
                    const Group&) { in.inner->param_groups()[1].options().set_lr(0.01000000001); },
                 "group 1 lr 0.01 ", "group 1 lr 0.01000000001 ");
  expect_differs(
      [](Ingredients& in, const Group&) { in.inner = make_inner(Inner::kAdam, *in.model); },
      "inner optimizer AdamW", "inner optimizer Adam\n");
  expect_differs([](Ingredients& in, const Group&) { in.model->scale.requires_grad_(false); },
                 "parameter scale", "parameter empty");
  expect_differs(
      [](Ingredients& in, const Group&) { in.model->register_buffer("more", at::ones({2})); },
      "(nothing more)", "buffer more shape [2] dtype Float");
}

struct TwoLayers : torch::nn::Module {
  TwoLayers(const std::string& first, const std::string& second) {
    register_parameter(first, at::ones({4}));
    register_parameter(second, at::ones({4}));
  }
};

TEST(ConstructionTest, NamesAndOrderThatDiffer) {
  const std::vector<std::pair<std::string, std::string>> other = {{"a", "c"}, {"b", "a"}};
  for (const auto& names : other) {
    run_ranks(2, [&](const Group& group) {
      TwoLayers model(group.rank() == 0 ? "a" : names.first,
                      group.rank() == 0 ? "b" : names.second);
      const std::string text = error_soon([&] {
        ZeroOptimizer optimizer(
            model, std::make_unique<torch::optim::AdamW>(model.parameters(), 0.1), group);
      });
      const bool order = names.first == "b";
      expect_words(text,
                   {"first difference", order ? "rank 0: parameter a" : "rank 0: parameter b",
                    order ? "rank 1: parameter b" : "rank 1: parameter c", "in the same order"});
    });
  }
}

// Every rank believes in another number of ranks.
TEST(ConstructionTest, WorldSizesThatDiffer) {
  const std::vector<std::vector<int>> cases = {{2, 3}, {3, 2, 3}, {4, 3, 3}};
  for (const std::vector<int>& sizes : cases) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::string> texts(sizes.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < sizes.size(); ++r) {
      threads.emplace_back([&, r] {
        const Group group(store, static_cast<int>(r), sizes[r], "test",
                          default_backend_factory(at::kCPU, "127.0.0.1"), at::kCPU,
                          std::chrono::seconds(30));
        texts[r] = error_soon([&] { Rank rank(group); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t r = 0; r < sizes.size(); ++r) {
      expect_words(texts[r], {"expected the same world size on every rank, got ", " on rank ",
                              "this is rank " + std::to_string(r),
                              "start all ranks with the same WORLD_SIZE"});
    }
  }
}

}  // namespace
}  // namespace zero
