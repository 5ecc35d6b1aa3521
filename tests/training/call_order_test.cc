// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Collective calls in orders that are refused, or have a meaning of their own; call_sequence_test
// has every order that is allowed. A model whose gradients are given numbers makes every value
// known in advance.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/warnings.h"
#include "zero/combined_optimizer.h"
#include "zero/comm/row_communicator.h"
#include "zero/mesh.h"
#include "zero/muon.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr int64_t kParameters = 9;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Parameter k has the value k at the start and gradient `factor * (k + 1)` in every element.
struct Linear final : torch::nn::Module {
  explicit Linear(c10::ScalarType dtype = at::kFloat) {
    for (int64_t k = 0; k < kParameters; ++k) {
      const auto options = at::TensorOptions().dtype(dtype);
      register_parameter("p" + std::to_string(k),
                         at::full({100 + k}, static_cast<double>(k), options));
    }
  }
  at::Tensor loss(double factor, int64_t without = -1) {
    at::Tensor sum = at::zeros({}, at::kFloat);
    for (int64_t k = 0; k < kParameters; ++k) {
      const double slope = static_cast<double>(k + 1) * factor;
      if (k != without) sum = sum + parameters()[k].to(at::kFloat).sum() * slope;
    }
    return sum;
  }
};

double norm_of(double factor) {
  double sum = 0;
  for (int64_t k = 0; k < kParameters; ++k) {
    sum += static_cast<double>(100 + k) * std::pow(factor * static_cast<double>(k + 1), 2);
  }
  return std::sqrt(sum);
}

using Words = std::vector<std::string>;

struct Rank {
  Rank(const Group& group, const ZeroOptions& options, c10::ScalarType dtype = at::kFloat)
      : group(group), model(dtype) {
    auto sgd = std::make_unique<torch::optim::SGD>(model.parameters(), 1.0);
    inner = sgd.get();
    optimizer = std::make_unique<ZeroOptimizer>(model, std::move(sgd), group, options);
  }
  void backward(double factor) { optimizer->backward(model.loss(factor)); }
  // After a step of learning rate 1 with a mean gradient of `factor * (k + 1)`.
  void expect_moved(double factor, double tolerance = 0) {
    double k = 0;
    for (const at::Tensor& p : model.parameters()) {
      const at::Tensor expected = at::full_like(p.detach(), k - factor * (k + 1));
      EXPECT_TRUE(at::allclose(p.detach(), expected, tolerance, tolerance))
          << "parameter " << k << " is " << p[0].item<double>() << ", expected "
          << expected[0].item<double>() << " on rank " << group.rank();
      ++k;
    }
  }

  Group group;
  Linear model;
  torch::optim::Optimizer* inner;
  std::unique_ptr<ZeroOptimizer> optimizer;
};

ZeroOptions options_of(int64_t stage, Layout layout = Layout::kContiguous) {
  return ZeroOptions().stage(stage).layout(layout).bucket_bytes(512);
}

void on_all(const std::function<void(const Group&, const ZeroOptions&)>& body) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const int64_t stage : {1, 2}) {
      for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
        SCOPED_TRACE("ranks " + std::to_string(world_size) + " stage " + std::to_string(stage));
        RunOptions run;
        run.shared_memory = (world_size + stage + static_cast<int>(layout)) % 2 == 0;
        run_ranks(
            world_size, [&](const Group& group) { body(group, options_of(stage, layout)); }, run);
      }
    }
  }
}

// ---------------------------------------------------------------------
// What is sent comes after the reductions

TEST(CallOrderTest, ACommunicatorRefusesToOvertakeReductions) {
  run_ranks(2, [](const Group& group) {
    const auto data = group.make_communicator("data", Purpose::kData);
    RowCommunicator(*data).begin_reductions();
    at::Tensor rows = at::zeros({2, 4});
    const auto expect_refused = [](const std::function<void()>& call) {
      expect_words(error_of(call), {"while gradient reductions are queued"});
    };
    expect_refused([&] { data->gather_rows(rows, "x").wait(); });
    expect_refused([&] { data->broadcast(rows, 0, "x").wait(); });
    expect_refused([&] { data->all_reduce_sum(at::zeros({2}, at::kDouble), "x").wait(); });
    expect_refused([&] { data->all_gather_text("a", "x"); });
    data->exchange_rows(rows, at::zeros({2, 4}), "x").wait();
    RowCommunicator(*data).end_reductions();
    data->gather_rows(rows, "x").wait();
  });
}

// ---------------------------------------------------------------------
// The norm is that of the agreed gradients

// torch refuses to differentiate such a loss. Here other ranks may have another.
TEST(CallOrderTest, StepsThatNoLossReachesAreWarnedOfOnce) {
  run_ranks(2, [](const Group& group) {
    Rank r(group, options_of(2));
    Warnings warnings;
    for (int i = 0; i < 3; ++i) {
      r.optimizer->backward(at::zeros({}));
      if (i == 0 && group.rank() == 1) r.backward(2.0);
      r.optimizer->clip_grad_norm_(1e9);
      r.optimizer->step();
      EXPECT_EQ(warnings.texts.size(), i == 0 ? 0 : 1) << i;
    }
    expect_words(warnings.texts.at(0), {"expected a gradient", "any parameter on any rank"});
    r.expect_moved(1.0);
  });
}

// A gradient of one's own has a place where no pass has sent one.
TEST(CallOrderTest, AnInfinityPutIntoAGradientAfterTheClipSkipsTheStep) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      Rank r(group, options_of(2));
      r.optimizer->backward(r.model.loss(1.0, /*without=*/3));
      r.optimizer->clip_grad_norm_(1e9);
      if (group.rank() == 0) {
        const at::Tensor p = r.model.parameters()[3];
        p.mutable_grad() = at::full_like(p.detach(), kInfinity);
      }
      r.optimizer->step();
      EXPECT_TRUE(r.optimizer->step_skipped());
      r.expect_moved(0.0);
      r.backward(1.0);
      r.optimizer->step();
      r.expect_moved(1.0);
    });
  }
}

TEST(CallOrderTest, AGradientPutInAfterTheClipIsClippedWithTheRest) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      Rank r(group, options_of(2));
      r.optimizer->backward(r.model.loss(1.0, /*without=*/3));
      r.optimizer->clip_grad_norm_(1.0);
      const at::Tensor p = r.model.parameters()[3];
      p.mutable_grad() = at::full_like(p.detach(), 4.0);
      EXPECT_NEAR(r.optimizer->grad_norm().item<double>(), 1.0, 1e-4);
      r.optimizer->step();
      r.expect_moved(1.0 / norm_of(1.0), 1e-5);
    });
  }
}

// Its sum of powers overflows although every gradient is finite.
TEST(CallOrderTest, AClipByAnInfiniteNormSkipsTheStep) {
  for (const bool deferred : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      Rank r(group, options_of(2).static_graph(deferred));
      r.backward(1e33);
      EXPECT_EQ(r.optimizer->clip_grad_norm_(1.0, 10.0).item<double>(), kInfinity);
      r.optimizer->step();
      EXPECT_TRUE(r.optimizer->step_skipped());
      r.expect_moved(0.0);
      // A norm that is only measured changes nothing.
      r.backward(1e33);
      EXPECT_EQ(r.optimizer->grad_norm(10.0).item<double>(), kInfinity);
      r.optimizer->step();
      EXPECT_FALSE(r.optimizer->step_skipped());
    });
  }
}

TEST(CallOrderTest, WithAStaticGraphWhatIsResetIsRefused) {
  run_ranks(2, [](const Group& group) {
    Rank r(group, options_of(2).static_graph(true));
    for (int i = 0; i < 2; ++i) {
      r.backward(1.0);
      r.model.zero_grad();
      expect_words(error_of([&] { r.optimizer->step(); }),
                   {"zero_grad() of the module", "static_graph(true) promises"});
      r.optimizer->zero_grad();
      r.backward(0.5);
      r.optimizer->step();
    }
    r.expect_moved(1.0);
  });
}

// ---------------------------------------------------------------------
// A mesh whose ranks hold different parameters

// Each rank is a domain of its own, and the mesh is all of them.
struct Apart {
  explicit Apart(const Group& group, double lr = 1.0) {
    const Group alone = group.subgroup({group.rank()}, "alone");
    optimizer = std::make_unique<ZeroOptimizer>(
        model, std::make_unique<torch::optim::SGD>(model.parameters(), lr), alone,
        ZeroOptions().mesh_group(group));
  }
  Linear model;
  std::unique_ptr<ZeroOptimizer> optimizer;
};

TEST(CallOrderTest, ClipArgumentsAreComparedOverAMeshOfDifferentParameters) {
  for (const int world_size : {2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      Apart r(group);
      const bool other = group.rank() == 1;
      const auto expect_refused = [&](double max_norm, double type) {
        r.optimizer->backward(r.model.loss(1.0));
        expect_words(error_of([&] { r.optimizer->clip_grad_norm_(max_norm, type); }),
                     {"expected the same call with the same arguments", "max_norm", "rank 1"});
      };
      expect_refused(other ? 1000.0 : 1.0, 2.0);
      expect_refused(1.0, other ? kInfinity : 2.0);
      r.optimizer->clip_grad_norm_(1e9);
      r.optimizer->step();
    });
  }
}

TEST(CallOrderTest, StepOptionsAreComparedWithinADomain) {
  run_ranks(4, [](const Group& world) {
    const Mesh mesh(world, {{"expert", 2}, {"data", 2}});
    Linear model;
    const double lr = world.rank() < 2 ? 0.5 : 0.25;  // domains may differ
    ZeroOptimizer optimizer(model, std::make_unique<torch::optim::SGD>(model.parameters(), lr),
                            mesh.group({"data"}), ZeroOptions().mesh_group(mesh.all()));
    optimizer.backward(model.loss(1.0));
    auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    if (world.rank() == 3) options.lr(0.125);
    expect_words(error_of([&] { optimizer.step(); }),
                 {"expected the same call with the same arguments", "rank 2: step() with options",
                  "lr 0.125"});
    options.lr(lr);
    optimizer.step();
    EXPECT_FLOAT_EQ(model.parameters()[0][0].item<float>(), static_cast<float>(-lr));
  });
}

TEST(CallOrderTest, DifferentCallsOnAMeshOfDifferentParametersAreNamed) {
  run_ranks(2, [](const Group& group) {
    Apart r(group);
    r.optimizer->backward(r.model.loss(1.0));
    const std::string text = error_of([&] {
      group.rank() == 0 ? r.optimizer->step() : r.optimizer->master(r.model.parameters()[0]);
    });
    expect_words(text, {"rank 0: step() with options lr 1", "rank 1: master() with parameter p0"});
    r.optimizer->step();
  });
}

// As an expert that no token reaches.
TEST(CallOrderTest, ARankOfAMeshMayHaveNoGradientForManySteps) {
  run_ranks(2,
            [](const Group& group) {
              Apart r(group);
              for (int step = 0; step < 12; ++step) {
                r.optimizer->backward(group.rank() == 0 ? at::zeros({}) : r.model.loss(1.0));
                EXPECT_EQ(error_of([&] { r.optimizer->step(); }), "") << step;
              }
            },
            {.timeout = std::chrono::seconds(10)});
}

// ---------------------------------------------------------------------
// Calls that would do nothing

TEST(CallOrderTest, ClippingWithoutGradientsThrows) {
  on_all([](const Group& group, const ZeroOptions& options) {
    Rank r(group, options);
    const auto expect_refused = [&] {
      expect_words(error_of([&] { r.optimizer->clip_grad_norm_(1.0); }),
                   {"expected gradients since the last step, got no backward pass",
                    "after the last backward", "rank " + std::to_string(group.rank())});
      EXPECT_EQ(r.optimizer->grad_norm().item<double>(), 0.0);
    };
    expect_refused();
    r.backward(1.0);
    r.optimizer->step();
    expect_refused();
    // A loss that reaches no parameter is a pass all the same.
    r.optimizer->backward(at::zeros({}));
    EXPECT_EQ(r.optimizer->clip_grad_norm_(1.0).item<double>(), 0.0);
    r.optimizer->step();
    if (group.rank() == 0) {
      auto guard = r.optimizer->no_sync();
      r.optimizer->backward(at::zeros({}));
    }
    EXPECT_EQ(r.optimizer->clip_grad_norm_(1.0).item<double>(), 0.0);
    r.optimizer->step();
    r.expect_moved(1.0);
  });
}

TEST(CallOrderTest, WrongClipsByValueAreRefusedOnAllRanks) {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [](const Group& group) {
      Rank r(group, options_of(2));
      const bool bad = group.rank() == group.world_size() - 1;
      const auto clip = [&](double value) {
        return error_of([&] { r.optimizer->clip_grad_value_(value); });
      };
      expect_words(clip(1.0), {"clip_grad_value_()", "no backward pass", "before step()"});
      r.backward(1.0);
      for (const double value : {0.0, -1.0, std::nan("")}) {
        expect_words(clip(bad ? value : 1.0), {"clip_value: expected a number above 0"});
      }
      if (group.world_size() > 1) {
        expect_words(clip(bad ? 2.0 : 1.0), {"clip_grad_value_() with clip_value 1",
                                             "clip_grad_value_() with clip_value 2"});
      }
      EXPECT_EQ(clip(0.25), "");
      expect_words(error_of([&] { r.backward(1.0); }), {"backward() between a clip and step()"});
      EXPECT_NE(error_of([&] { r.optimizer->step(); }), "");
      r.optimizer->step();
      EXPECT_EQ(r.model.parameters()[4][0].item<double>(), 3.75);
    });
  }
}

TEST(CallOrderTest, PlainBackwardWithoutTheLossScaleThrows) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      Rank r(group, options_of(2).loss_scaler(LossScalerOptions()));
      const std::string words = "expected optimizer.backward(loss)";
      for (int i = 0; i < 2; ++i) {
        expect_words(error_of([&] { r.model.loss(1.0).backward(); }),
                     {words, "scale_loss", "65536"});
        expect_words(error_of([&] { r.optimizer->step(); }), {words});
        r.optimizer->zero_grad();
        // A scaled pass scales no other.
        r.backward(1.0);
        expect_words(error_of([&] { r.model.loss(1.0).backward(); }), {words});
        expect_words(error_of([&] { r.optimizer->step(); }), {words});
        r.optimizer->zero_grad();
        // Without a loss at all.
        const at::Tensor p = r.model.parameters()[0];
        p.mutable_grad() = at::ones_like(p.detach());
        expect_words(error_of([&] { r.optimizer->step(); }), {words});
        r.optimizer->zero_grad();
        const double factor = std::exp2(-i - 1);
        // The second time begins behind a step whose passes were scaled.
        i == 0 ? r.optimizer->scale_loss(r.model.loss(factor)).backward() : r.backward(factor);
        r.optimizer->step();
        r.expect_moved(1.0 - factor);
      }
    });
  }
}

// The scale changes in step() alone.
TEST(CallOrderTest, AScaledLossStaysScaledThroughZeroGrad) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [](const Group& group) {
      Rank r(group, options_of(2).loss_scaler(LossScalerOptions()));
      r.backward(1.0);
      const at::Tensor loss = r.optimizer->scale_loss(r.model.loss(0.5));
      r.optimizer->zero_grad();
      r.optimizer->zero_grad();
      loss.backward();
      r.optimizer->step();
      r.expect_moved(0.5);
      expect_words(error_of([&] { r.model.loss(1.0).backward(); }), {"that was not scaled"});
      expect_words(error_of([&] { r.optimizer->step(); }), {"that was not scaled"});
    });
  }
}

TEST(CallOrderTest, ARefusedPassLeavesWhatNoSyncKept) {
  for (const int64_t stage : {1, 2}) {
    for (const int world_size : {1, 2, 3}) {
      run_ranks(world_size, [&](const Group& group) {
        Rank r(group, options_of(stage).loss_scaler(LossScalerOptions()));
        {
          const auto guard = r.optimizer->no_sync();
          r.backward(0.5);
        }
        const Words words{"a loss that was not scaled", "65536"};
        expect_words(error_of([&] { r.model.loss(1.0).backward(); }), words);
        expect_words(error_of([&] { r.optimizer->step(); }), words);
        r.optimizer->step();
        r.expect_moved(0.5);
      });
    }
  }
}

TEST(CallOrderTest, APassThatIsRefusedAfterAClipLeavesWhatIsInAGradient) {
  for (const int64_t stage : {1, 2}) {
    for (const int world_size : {1, 2, 3}) {
      run_ranks(world_size, [&](const Group& group) {
        Rank r(group, options_of(stage));
        const at::Tensor by_hand = r.model.parameters()[3], sent = r.model.parameters()[4];
        r.optimizer->backward(r.model.loss(1.0, /*without=*/3));
        r.optimizer->clip_grad_norm_(1e9);
        by_hand.mutable_grad() = at::full_like(by_hand.detach(), 4.0);
        const at::Tensor shown = sent.grad().clone();
        for (const at::Tensor& p : {by_hand, sent}) {
          const std::string words = "backward() between a clip and step()";
          expect_words(error_of([&] { p.sum().backward(); }), {words});
          expect_words(error_of([&] { r.optimizer->step(); }), {words});
        }
        EXPECT_TRUE(at::allclose(sent.grad(), shown, 0, 0, /*equal_nan=*/true));
        r.optimizer->step();
        r.expect_moved(1.0);
      });
    }
  }
}

using MakeInner =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

void expect_seen(const MakeInner& make, bool fused) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      Linear model, plain;
      auto given = make(model.parameters());
      torch::optim::Optimizer* const kept = given.get();
      ZeroOptimizer optimizer(model, std::move(given), group, ZeroOptions().fused(fused));
      const auto reference = make(plain.parameters());
      for (int i = 0; i < 3; ++i) {
        // The loop of a trainer for plain torch.
        kept->zero_grad();
        optimizer.backward(model.loss(1.0));
        const int64_t state = optimizer.memory().optimizer_state;
        kept->step();
        EXPECT_EQ(optimizer.memory().optimizer_state, state);
        const at::Tensor loss = model.loss(1.0);
        expect_words(error_of([&] { i == 1 ? loss.backward() : optimizer.backward(loss); }),
                     {"step() of the inner optimizer", "expected step() of the ZeroOptimizer"});
        expect_words(error_of([&] { optimizer.step(); }), {"step() of the inner optimizer"});
        optimizer.step();
        plain.zero_grad();
        plain.loss(1.0).backward();
        reference->step();
        for (size_t p = 0; p < plain.parameters().size(); ++p) {
          EXPECT_TRUE(at::allclose(model.parameters()[p], plain.parameters()[p], 1e-5, 1e-6));
        }
      }
    });
  }
}

template <typename Inner, typename Options>
void expect_seen(const Options& options, bool fused) {
  expect_seen([&](const auto& parameters) { return std::make_unique<Inner>(parameters, options); },
              fused);
}

// Its first group takes parameters of 100 elements only.
std::unique_ptr<torch::optim::Optimizer> make_muon_with_split(std::vector<at::Tensor> parameters) {
  const auto split = [](const at::Tensor& t) { return std::vector<at::Tensor>{t.view({4, 25})}; };
  std::vector<std::unique_ptr<torch::optim::Optimizer>> parts;
  parts.push_back(std::make_unique<Muon>(std::vector<at::Tensor>{parameters.front()},
                                         MuonOptions(0.02).split(split)));
  parameters.erase(parameters.begin());
  parts.push_back(std::make_unique<torch::optim::AdamW>(parameters, 0.1));
  return std::make_unique<CombinedOptimizer>(std::move(parts));
}

TEST(CallOrderTest, AStepOfTheInnerOptimizerIsSeenAtTheNextCall) {
  for (const bool fused : {true, false}) {
    expect_seen<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), fused);
    expect_seen<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1), fused);
  }
  expect_seen<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1), false);
  expect_seen<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1), false);
  expect_seen(make_muon_with_split, true);
}

TEST(CallOrderTest, TooManySkippedStepsInARowThrow) {
  for (const bool deferred : {false, true}) {
    for (const int world_size : {1, 2}) {
      run_ranks(world_size, [&](const Group& group) {
        Rank r(group, options_of(2).max_skipped_in_a_row(20).static_graph(deferred));
        const auto run = [&](int steps, double factor) {
          for (int i = 0; i < steps; ++i) {
            r.backward(group.rank() == 0 ? factor : 1.0);
            r.optimizer->step();
          }
        };
        run(15, kInfinity);
        run(1, 0.0);
        run(deferred ? 4 : 20, kInfinity);
        const std::string text = error_of([&] { run(64, kInfinity); });
        expect_words(text, {"steps in a row were skipped", "at most 20, ZeroOptions"});
        r.backward(0.0);
        r.optimizer->step();
      });
    }
  }
}

// ---------------------------------------------------------------------
// Averages in p.grad()

TEST(CallOrderTest, AChangeOfAnAverageInStage1Throws) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    run_ranks(2, [&](const Group& group) {
      Rank r(group, options_of(1, layout));
      const auto expect_refused = [&](const std::function<void(const at::Tensor&)>& change) {
        r.backward(1.0);
        r.optimizer->reduce_gradients();
        if (group.rank() == 1) change(r.model.parameters()[4]);
        expect_words(error_of([&] { r.optimizer->step(); }),
                     {"expected the averaged gradient in p.grad() to be only read"});
        r.optimizer->zero_grad();
      };
      expect_refused([](const at::Tensor& p) { p.mutable_grad().mul_(0.5); });
      expect_refused([](const at::Tensor& p) { p.mutable_grad() = at::ones_like(p.detach()); });
      // As people call it on all ranks. It raises no version.
      r.backward(1.0);
      r.optimizer->reduce_gradients();
      const double norm = torch::nn::utils::clip_grad_norm_(r.model.parameters(), 0.1);
      EXPECT_GT(norm, 0.1);
      for (const auto& call : std::vector<std::function<void()>>{
               [&] { r.optimizer->clip_grad_norm_(1.0); }, [&] { r.optimizer->step(); }}) {
        expect_words(error_of(call),
                     {"expected the averaged gradient in p.grad() to be only read"});
      }
      r.optimizer->zero_grad();
      // As a measure of gradients that are not finite it writes NaN. The step is skipped as ever.
      r.backward(kInfinity);
      r.optimizer->reduce_gradients();
      torch::nn::utils::clip_grad_norm_(r.model.parameters(), kInfinity);
      r.optimizer->step();
      EXPECT_TRUE(r.optimizer->step_skipped());
      r.backward(1.0);
      r.optimizer->step();
      r.expect_moved(1.0);
    });
  }
}

// Behind the elements that are compared first.
TEST(CallOrderTest, AChangeOfTheEndOfALargeAverageThrows) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    run_ranks(2, [&](const Group& group) {
      torch::nn::Module module;
      const at::Tensor p = module.register_parameter("p", at::zeros({(1 << 18) + 5}, dtype));
      const at::Tensor slope = at::arange(p.numel(), at::kFloat).remainder(97);
      ZeroOptimizer optimizer(module, std::make_unique<torch::optim::SGD>(module.parameters(), 1.0),
                              group, ZeroOptions().stage(1));
      const auto reduce = [&] {
        optimizer.backward((p.to(at::kFloat) * slope).sum());
        optimizer.reduce_gradients();
      };
      reduce();
      optimizer.step();
      reduce();
      if (group.rank() == 1) p.grad().data()[p.numel() - 1] += 1;
      expect_words(error_of([&] { optimizer.step(); }),
                   {"expected the averaged gradient in p.grad() to be only read"});
    });
  }
}

// backward() with a list of inputs adds to those.
TEST(CallOrderTest, BackwardIntoChosenInputsIsCounted) {
  for (const int64_t stage : {1, 2}) {
    run_ranks(2, [&](const Group& group) {
      Rank r(group, options_of(stage));
      r.backward(1.0);
      r.optimizer->reduce_gradients();
      torch::autograd::backward({r.model.loss(1.0)}, {}, c10::nullopt, false,
                                {r.model.parameters()[0]});
      r.optimizer->step();
      const auto parameters = r.model.parameters();
      EXPECT_EQ(parameters[0][0].item<double>(), -2.0);
      EXPECT_EQ(parameters[1][0].item<double>(), -1.0);
    });
  }
}

// ---------------------------------------------------------------------
// Memory

TEST(CallOrderTest, BucketsOfThePerParameterLayoutAreBounded) {
  for (const int64_t stage : {1, 2}) {
    run_ranks(1, [&](const Group& group) {
      Rank r(group, options_of(stage, Layout::kPerParameter).bucket_bytes(64));
      for (int i = 0; i < 2; ++i) {
        r.backward(1.0);
        r.optimizer->step();
      }
      // Each of the nine parameters is a bucket. Four gathers are under way at most, and one more
      // bucket is written.
      EXPECT_EQ(r.optimizer->plan().buckets.size(), 9);
      EXPECT_LE(r.optimizer->memory().peak_buckets, 5 * 448);
    });
  }
}

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 3); }
