// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What travels while something else is computed, in the order of events: two ranks on the few cores
// of a test machine cannot show it in time.
#include <ATen/ops/mse_loss.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// Layers of one bucket each. The extra one comes last, as the first to be reduced, and is not used.
struct StackImpl : torch::nn::Module {
  StackImpl(int64_t layers, bool extra) {
    for (int64_t i = 0; i < layers; ++i) {
      list.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(32, 32)));
    }
    if (extra) unused = register_module("unused", torch::nn::Linear(32, 32));
    uint64_t seed = 1;
    at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.copy_(random_tensor(p.sizes(), seed++) * 0.2);
  }
  // `before` is called before each layer computes, `after` when its gradient was made.
  at::Tensor loss(int rank, const std::function<void(torch::nn::Linear&)>& before = nullptr,
                  const std::function<void()>& after = nullptr) {
    at::Tensor x = random_tensor({4, 32}, 100 + rank);
    for (torch::nn::Linear& layer : list) {
      if (before) before(layer);
      x = layer->forward(x).tanh();
      if (after) {
        x.register_hook([after](const at::Tensor&) { after(); });
      }
    }
    return at::mse_loss(x, random_tensor({4, 32}, 7));
  }
  std::vector<torch::nn::Linear> list;
  torch::nn::Linear unused{nullptr};
};
TORCH_MODULE(Stack);

std::unique_ptr<torch::optim::Optimizer> sgd(torch::nn::Module& module) {
  return std::make_unique<torch::optim::SGD>(module.parameters(), torch::optim::SGDOptions(0.1));
}

constexpr int64_t kLayerBytes = (32 * 32 + 32) * 4;

RunOptions on_memory() {
  RunOptions run;
  run.network = std::make_shared<MemoryNetwork>();
  return run;
}

// Nothing that a rank sends arrives before all ranks have ended their backward passes, which they
// do: hooks do not wait for peers. What has been sent by then was sent during the pass.
TEST(OverlapTest, ReductionsStartDuringTheBackwardPassAndNeverHoldItUp) {
  const RunOptions run = on_memory();
  run_ranks(
      2,
      [&](const Group& group) {
        const int rank = group.global_rank();
        Stack model(6, false);
        ZeroOptimizer optimizer(*model, sgd(*model), group,
                                ZeroOptions().bucket_bytes(kLayerBytes));
        const auto sends = [&] { return run.network->counts(rank).calls_of(MemoryOp::kSend); };
        run.network->hold_after(rank, 0);
        const int64_t before = sends();
        int64_t during = 0;
        optimizer.backward(model->loss(rank, nullptr, [&] { during = sends() - before; }));
        EXPECT_GE(during, 2) << "of 6 buckets, when the first layer's gradient was made";
        run.network->release(rank);
        optimizer.step();
      },
      run);
}

// The gathers of the first buckets cannot end while the last ones are being updated, since nothing
// arrives; so step() must have updated all of them before it waits for any.
TEST(OverlapTest, GathersOfFinishedBucketsRunWhileOthersAreUpdated) {
  const RunOptions run = on_memory();
  run_ranks(
      2,
      [&](const Group& group) {
        const int rank = group.global_rank();
        Stack model(6, false);
        ZeroOptimizer optimizer(*model, sgd(*model), group,
                                ZeroOptions().bucket_bytes(kLayerBytes).overlap_gather(true));
        const auto buckets = static_cast<int64_t>(optimizer.plan().buckets.size());
        ASSERT_GE(buckets, 5);
        optimizer.backward(model->loss(rank));
        optimizer.clip_grad_norm_(1.0);
        run.network->hold_after(rank, 1);  // but for the control message of step()
        const int64_t before = run.network->counts(rank).calls_of(MemoryOp::kSend);
        optimizer.step();
        EXPECT_EQ(run.network->counts(rank).calls_of(MemoryOp::kSend) - before, 1 + buckets);
        run.network->release(rank);
        optimizer.wait_for(*model);
      },
      run);
}

// An unused layer that would be reduced first holds everything back in the first step only.
TEST(OverlapTest, BucketsWithUnusedParametersGoLast) {
  constexpr int kLayers = 6;
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      Stack model(kLayers, true);
      ZeroOptimizer optimizer(*model, sgd(*model), group, ZeroOptions().bucket_bytes(kLayerBytes));
      Stack reference(kLayers, true);
      torch::optim::SGD plain(reference->parameters(), torch::optim::SGDOptions(0.1));
      int64_t first_peak = 0;
      for (int step = 0; step < 3; ++step) {
        int64_t most = 0;
        optimizer.backward(model->loss(group.rank(), nullptr, [&] {
          most = std::max(most, optimizer.memory().unsent_gradients);
        }));
        if (step == 0) {
          first_peak = most;
          EXPECT_GE(most, (kLayers - 1) * kLayerBytes) << "the unused layer should hold all back";
        } else {
          EXPECT_LE(most, 3 * kLayerBytes) << "first step " << first_peak;
        }
        optimizer.step();
        plain.zero_grad();
        for (int r = 0; r < world_size; ++r) (reference->loss(r) / world_size).backward();
        plain.step();
        for (size_t i = 0; i < reference->parameters().size(); ++i) {
          EXPECT_TRUE(at::allclose(model->parameters()[i], reference->parameters()[i], 1e-6, 1e-7));
        }
      }
    });
  }
}

TEST(OverlapTest, ParametersTravelDuringTheNextForwardPass) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    const RunOptions run = on_memory();
    run_ranks(
        2,
        [&](const Group& group) {
          const int rank = group.global_rank();
          Stack model(4, false), same(4, false);
          const auto options = ZeroOptions().bucket_bytes(kLayerBytes).layout(layout);
          ZeroOptimizer overlapped(*model, sgd(*model), group,
                                   ZeroOptions(options).overlap_gather(true));
          ZeroOptimizer plain(*same, sgd(*same), group, options);
          for (int step = 0; step < 4; ++step) {
            const auto wait = [&](torch::nn::Linear& layer) { overlapped.wait_for(*layer); };
            overlapped.backward(model->loss(rank, wait));
            plain.backward(same->loss(rank));
            plain.step();
            overlapped.clip_grad_norm_(1e9);   // all gradients have been sent after this
            run.network->hold_after(rank, 1);  // but for the control message
            overlapped.step();
            EXPECT_FALSE(at::equal(model->list[2]->weight, same->list[2]->weight))
                << "no rank has the other's half yet";
            run.network->release(rank);
            overlapped.wait_for(*model->list[2]);
            EXPECT_TRUE(at::equal(model->list[2]->weight, same->list[2]->weight));
            EXPECT_TRUE(at::equal(model->list[2]->bias, same->list[2]->bias));
            if (step == 2) overlapped.check_replicas();  // waits by itself
          }
          overlapped.wait_for(*model);
          for (size_t i = 0; i < same->parameters().size(); ++i) {
            EXPECT_TRUE(at::equal(model->parameters()[i], same->parameters()[i]));
          }
          overlapped.step();
        },
        run);
  }
}

// A step of which the control message arrives, and no parameters until the network releases them.
void step_and_hold(ZeroOptimizer& optimizer, const at::Tensor& loss, MemoryNetwork& network,
                   int rank) {
  optimizer.backward(loss);
  optimizer.clip_grad_norm_(1e9);  // all gradients have been sent after this
  network.hold_after(rank, 1);
  optimizer.step();
}

TEST(OverlapTest, AForwardPassThatDidNotWaitIsRefused) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    for (const int world_size : {1, 2}) {
      const RunOptions run = on_memory();
      run_ranks(
          world_size,
          [&](const Group& group) {
            const int rank = group.global_rank();
            Stack model(3, false);
            ZeroOptimizer optimizer(
                *model, sgd(*model), group,
                ZeroOptions().layout(layout).bucket_bytes(kLayerBytes).overlap_gather(true));
            const auto step_and = [&](const std::function<void()>& body) {
              optimizer.wait_for(*model);
              step_and_hold(optimizer, model->loss(rank), *run.network, rank);
              body();
              run.network->release(rank);
            };
            at::Tensor torn;
            step_and([&] { torn = model->loss(rank); });
            expect_words(error_of([&] { optimizer.backward(torn); }),
                         {"modified by an inplace operation", "wait_for(module)"});
            optimizer.zero_grad();
            // An edit meanwhile is seen as ever.
            step_and([&] {
              const at::NoGradGuard no_grad;
              model->list[0]->bias.add_(1);
            });
            expect_words(error_of([&] { optimizer.grad_norm(); }), {"edited in place"});
          },
          run);
    }
  }
}

// Rows that arrive later would take back a part of the change, or be written behind the end of
// other memory.
TEST(OverlapTest, AChangeOfAParameterThatIsUnderWayIsRefusedOnAllRanks) {
  struct Change {
    const char* name;
    std::function<void(const at::Tensor&)> make;
    bool shape = false;
  };
  const std::vector<Change> changes{
      {"loaded", [](const at::Tensor& p) { at::Tensor(p).set_data(at::full_like(p, 3)); }},
      {"edited", [](const at::Tensor& p) { p.detach().fill_(3); }},
      {"smaller", [](const at::Tensor& p) { at::Tensor(p).set_data(at::full({2}, 3.0)); }, true},
  };
  for (const Change& change : changes) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      for (const int world_size : {1, 2}) {
        // One rank alone has all rows, in place.
        if (world_size == 1 && layout == Layout::kContiguous) continue;
        SCOPED_TRACE(change.name);
        const RunOptions run = on_memory();
        run_ranks(
            world_size,
            [&](const Group& group) {
              const int rank = group.global_rank();
              Stack model(3, false);
              ZeroOptimizer optimizer(
                  *model, sgd(*model), group,
                  ZeroOptions().layout(layout).bucket_bytes(kLayerBytes).overlap_gather(true));
              at::Tensor weight = model->list[1]->weight;
              const at::Tensor place = weight.detach();
              for (const bool waited_since : {false, true}) {
                step_and_hold(optimizer, model->loss(rank), *run.network, rank);
                const at::NoGradGuard no_grad;
                if (rank == 0) change.make(weight);
                run.network->release(rank);
                if (waited_since) optimizer.wait_for(*model);
                const std::string text = error_of([&] { optimizer.refresh_master_parameters(); });
                expect_words(text, {"layer1.weight", "wait_for(module)", "edited in place"});
                if (rank == 0 && layout == Layout::kPerParameter) {
                  EXPECT_TRUE(weight.eq(3).all().item<bool>()) << "rows were published there";
                }
                if (change.shape && rank == 0) weight.set_data(place);
                // Rightly, as the text says.
                weight.fill_(5);
                optimizer.refresh_master_parameters();
                EXPECT_TRUE(weight.eq(5).all().item<bool>());
                EXPECT_TRUE(optimizer.master(weight).eq(5).all().item<bool>());
                optimizer.check_replicas();
                const at::AutoGradMode grad(true);
                optimizer.backward(model->loss(rank));
                optimizer.step();
                optimizer.wait_for(*model);
              }
            },
            run);
      }
    }
  }
}

TEST(OverlapTest, ABackwardPassAfterAChangeOfWhatIsUnderWayIsRefusedToo) {
  run_ranks(
      2,
      [&](const Group& group) {
        Stack model(3, false);
        ZeroOptimizer optimizer(*model, sgd(*model), group, ZeroOptions().overlap_gather(true));
        optimizer.backward(model->loss(group.rank()));
        optimizer.step();
        model->list[1]->weight.detach().fill_(3);
        optimizer.wait_for(*model);
        expect_words(error_of([&] { optimizer.backward(model->loss(group.rank())); }),
                     {"layer1.weight", "wait_for(module)"});
        expect_words(error_of([&] { optimizer.step(); }), {"layer1.weight", "wait_for(module)"});
      },
      on_memory());
}

// As a program does that goes back to what it had.
TEST(OverlapTest, ADestructorLeavesMemoryThatReplacedAParametersAsItIs) {
  for (const int world_size : {1, 2}) {
    run_ranks(
        world_size,
        [&](const Group& group) {
          Stack model(3, false);
          auto optimizer = std::make_unique<ZeroOptimizer>(
              *model, sgd(*model), group,
              ZeroOptions().layout(Layout::kPerParameter).overlap_gather(true));
          optimizer->backward(model->loss(group.rank()));
          optimizer->step();
          const at::NoGradGuard no_grad;
          for (at::Tensor& p : model->parameters()) p.set_data(at::full_like(p, 3));
          model->list[0]->bias.set_data(at::full({2}, 3.0));
          optimizer.reset();
          for (const at::Tensor& p : model->parameters()) {
            EXPECT_TRUE(p.eq(3).all().item<bool>());
          }
        },
        on_memory());
  }
}

// The graph of a first layer saves its input and not its weight, so that autograd sees nothing.
TEST(OverlapTest, ALayerWhoseWeightNoGraphSavesIsRefusedToo) {
  const auto test = [](const Group& group, Layout layout, bool own) {
    torch::nn::Linear layer(5, 3);
    ZeroOptimizer optimizer(*layer, sgd(*layer), group,
                            ZeroOptions().layout(layout).overlap_gather(true));
    const auto pass = [&] {
      const at::Tensor loss = at::pow(layer(at::ones({2, 5})) - 1, 2).sum();
      own ? optimizer.backward(loss) : loss.backward();
    };
    pass();
    optimizer.step();
    // One rank alone has all rows, in place.
    if (group.world_size() > 1 || layout == Layout::kPerParameter) {
      expect_words(error_of(pass), {"parameter", "wait_for(module)", "zero_grad()"});
      EXPECT_NE(error_of([&] { optimizer.grad_norm(); }), "");
      optimizer.zero_grad();
    }
    for (int step = 0; step < 2; ++step) {
      optimizer.wait_for(*layer);
      pass();
      pass();
      optimizer.step();
    }
  };
  for (const int world_size : {1, 2, 3}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      for (const bool own : {true, false}) {
        run_ranks(
            world_size, [&](const Group& group) { test(group, layout, own); }, on_memory());
      }
    }
  }
}

// Of each rank's rows only the first arrive: enough for the layer that computes first.
TEST(OverlapTest, WhatTheNextForwardPassNeedsFirstTravelsFirst) {
  for (Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    const RunOptions run = on_memory();
    run_ranks(
        2,
        [&](const Group& group) {
          const int rank = group.global_rank();
          Stack model(6, false), same(6, false);
          const auto options = ZeroOptions().bucket_bytes(kLayerBytes).layout(layout);
          ZeroOptimizer overlapped(*model, sgd(*model), group,
                                   ZeroOptions(options).overlap_gather(true));
          ZeroOptimizer plain(*same, sgd(*same), group, options);
          plain.backward(same->loss(rank));
          plain.step();
          overlapped.backward(model->loss(rank));
          overlapped.clip_grad_norm_(1e9);   // all gradients have been sent after this
          run.network->hold_after(rank, 3);  // but for the control message and two buckets
          overlapped.step();
          overlapped.wait_for(*model->list[0]);
          EXPECT_TRUE(at::equal(model->list[0]->weight, same->list[0]->weight));
          EXPECT_TRUE(at::equal(model->list[0]->bias, same->list[0]->bias));
          EXPECT_FALSE(at::equal(model->list[5]->weight, same->list[5]->weight));
          run.network->release(rank);
          overlapped.wait_for(*model);
        },
        run);
  }
}

}  // namespace
}  // namespace zero
