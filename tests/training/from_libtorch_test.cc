// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What docs/from_libtorch.md says of programs of one process, over 1 to 4 ranks and both stages:
// the same steps as plain torch's over the whole batches, or the difference that the page names.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/warnings.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

constexpr double kLearningRate = 1e-2;
constexpr double kRounding = 2e-6;

struct Net : torch::nn::Module {
  explicit Net(uint64_t seed)
      : first(register_module("first", torch::nn::Linear(6, 17))),
        second(register_module("second", torch::nn::Linear(17, 3))) {
    at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters()) p.copy_(random_tensor(p.sizes(), seed++) * 0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x).tanh()); }

  torch::nn::Linear first, second;
};

std::unique_ptr<torch::optim::Adam> adam(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(kLearningRate));
}

// A batch of `examples`, which is the same on all ranks.
struct Batch {
  explicit Batch(int64_t number, int64_t examples = 12)
      : x(random_tensor({examples, 6}, static_cast<uint64_t>(100 + number))),
        y(random_tensor({examples, 3}, static_cast<uint64_t>(200 + number))) {}
  Batch part_of(const Group& group) const {
    Batch part = *this;
    part.x = x.tensor_split(group.world_size())[static_cast<size_t>(group.rank())];
    part.y = y.tensor_split(group.world_size())[static_cast<size_t>(group.rank())];
    return part;
  }
  at::Tensor x, y;
};

at::Tensor loss(Net& net, const Batch& batch) {
  return at::mse_loss(net.forward(batch.x), batch.y);
}

// The largest difference between parameters of two modules.
double difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  double largest = 0.0;
  for (const auto& p : a.named_parameters()) {
    const at::Tensor gap = p.value().detach() - b.named_parameters()[p.key()].detach();
    largest = std::max(largest, gap.abs().max().item<double>());
  }
  return largest;
}

class FromLibtorchTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void run(const std::function<void(const Group&, const ZeroOptions&)>& body) {
    const auto [ranks, stage] = GetParam();
    run_ranks(ranks,
              [&, stage = stage](const Group& group) { body(group, ZeroOptions().stage(stage)); });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, FromLibtorchTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return "W" + std::to_string(std::get<0>(info.param)) + "Stage" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST_P(FromLibtorchTest, APartOfABatchOfAnySizeCountsByItsExamples) {
  run([](const Group& group, const ZeroOptions& options) {
    Net net(1), plain(1);
    ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
    const auto reference = adam(plain.parameters());
    const std::vector<int64_t> sizes = {12, 7, 6, 3, 2, 1, 12};
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Batch batch(static_cast<int64_t>(i), sizes[i]);
      reference->zero_grad();
      loss(plain, batch).backward();
      reference->step();

      const Batch part = batch.part_of(group);
      const double share = static_cast<double>(part.x.size(0)) / static_cast<double>(sizes[i]);
      if (share > 0) optimizer.backward(loss(net, part) * share * group.world_size());
      optimizer.step();
      EXPECT_LT(difference(net, plain), kRounding) << "batch of " << sizes[i];
    }
  });
}

TEST_P(FromLibtorchTest, GradientsFromBeforeTheOptimizerAreDropped) {
  run([](const Group& group, const ZeroOptions& options) {
    Net net(1), plain(1);
    if (group.rank() == 0) loss(net, Batch(9)).backward();
    ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
    const auto reference = adam(plain.parameters());
    optimizer.backward(loss(net, Batch(0).part_of(group)));
    optimizer.step();
    loss(plain, Batch(0)).backward();
    reference->step();
    EXPECT_LT(difference(net, plain), kRounding);
  });
}

// A regularizer that adds to gradients through their pointers, as one in CUDA does: before the
// pass, or behind one under no_sync().
TEST_P(FromLibtorchTest, AKernelAddsToGradientsThroughTheirPointers) {
  const auto add = [](const torch::nn::Module& net) {
    for (const at::Tensor& p : net.parameters()) {
      if (!p.grad().defined()) p.mutable_grad() = at::zeros_like(p.detach());
      float* const gradient = p.grad().data_ptr<float>();
      for (int64_t i = 0; i < p.numel(); ++i) gradient[i] += 0.1F * p.data_ptr<float>()[i];
    }
  };
  run([&](const Group& group, const ZeroOptions& options) {
    for (const bool before : {true, false}) {
      Net net(1), plain(1);
      ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
      const auto reference = adam(plain.parameters());
      for (int step = 0; step < 4; ++step) {
        const Batch batch(step);
        reference->zero_grad();
        loss(plain, batch).backward();
        add(plain);
        reference->step();
        if (before) {
          add(net);
          optimizer.backward(loss(net, batch.part_of(group)));
        } else {
          const auto guard = optimizer.no_sync();
          optimizer.backward(loss(net, batch.part_of(group)));
          add(net);
        }
        optimizer.step();
        EXPECT_LT(difference(net, plain), kRounding) << "step " << step;
      }
    }
  });
}

// As C++ programs tie weights: the head's member becomes the embedding's tensor. The tensor that
// the head registered before stays in parameters(), and no loss uses it.
struct TiedNet : torch::nn::Module {
  TiedNet()
      : embedding(register_module("embedding", torch::nn::Embedding(19, 5))),
        head(register_module("head",
                             torch::nn::Linear(torch::nn::LinearOptions(5, 19).bias(false)))) {
    at::NoGradGuard no_grad;
    uint64_t seed = 1;
    for (at::Tensor& p : parameters()) p.copy_(random_tensor(p.sizes(), seed++));
    head->weight = embedding->weight;
  }
  at::Tensor loss(const at::Tensor& words) {
    return torch::nn::functional::cross_entropy(head(embedding(words)), words + 1);
  }

  torch::nn::Embedding embedding;
  torch::nn::Linear head;
};

// Pairs are trained as Python trains a complex parameter.
TEST_P(FromLibtorchTest, PairsOfAComplexParameterTrain) {
  struct Spectral : torch::nn::Module {
    Spectral() : weight(register_parameter("weight", random_tensor({5, 4, 2}, 3) * 0.3)) {}
    at::Tensor forward(const at::Tensor& x) {
      return at::matmul(x, at::view_as_complex(weight)).abs();
    }
    at::Tensor weight;
  };
  const auto loss_of = [](Spectral& net, const at::Tensor& x) {
    return (net.forward(at::complex(x, x.flip(1))) - 0.5).square().mean();
  };
  run([&](const Group& group, const ZeroOptions& options) {
    Spectral net, plain;
    ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
    const auto reference = adam(plain.parameters());
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = random_tensor({12, 5}, static_cast<uint64_t>(60 + step));
      reference->zero_grad();
      loss_of(plain, x).backward();
      reference->step();
      optimizer.backward(loss_of(net, x.tensor_split(group.world_size())[group.rank()]));
      optimizer.step();
      EXPECT_LT(difference(net, plain), kRounding) << "step " << step;
    }
  });
}

TEST_P(FromLibtorchTest, WeightsTiedByTheMemberTrainAsOne) {
  run([](const Group& group, const ZeroOptions& options) {
    TiedNet net, plain;
    ASSERT_EQ(net.parameters().size(), 2u);
    ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
    const auto reference = adam(plain.parameters());
    const at::Tensor words = at::arange(12);
    for (int step = 0; step < 4; ++step) {
      optimizer.backward(
          net.loss(words.tensor_split(group.world_size())[static_cast<size_t>(group.rank())]));
      optimizer.step();
      reference->zero_grad();
      plain.loss(words).backward();
      reference->step();
    }
    EXPECT_TRUE(net.head->weight.is_same(net.embedding->weight));
    EXPECT_LT(difference(net, plain), kRounding);  // of the unused one too
  });
}

// A layer that is registered by itself and in a Sequential.
struct NamedTwice : torch::nn::Module {
  NamedTwice()
      : layer(register_module("layer", torch::nn::Linear(6, 3))),
        all(register_module("all", torch::nn::Sequential(layer))) {
    at::NoGradGuard no_grad;
    layer->weight.copy_(random_tensor({3, 6}, 1));
    layer->bias.zero_();
  }
  torch::nn::Linear layer;
  torch::nn::Sequential all;
};

TEST_P(FromLibtorchTest, WhatHasTwoNamesIsUpdatedOnceAndRank0Warns) {
  run([](const Group& group, const ZeroOptions& options) {
    const auto sgd = [](const std::vector<at::Tensor>& parameters) {
      return std::make_unique<torch::optim::SGD>(parameters, 0.125);
    };
    NamedTwice net, once, twice;
    ASSERT_EQ(net.parameters().size(), 4u);
    const Warnings warnings;
    ZeroOptimizer optimizer(net, sgd(net.parameters()), group, options);
    ASSERT_EQ(warnings.texts.size(), group.rank() == 0 ? 1u : 0u);
    if (group.rank() == 0) expect_words(warnings.texts.front(), {"layer.weight", "twice"});
    const at::Tensor x = at::ones({2, 6});  // gradients of whole numbers
    optimizer.backward(net.all->forward(x).sum());
    optimizer.step();
    const auto step = [&](NamedTwice& plain, const std::vector<at::Tensor>& parameters) {
      plain.all->forward(x).sum().backward();
      sgd(parameters)->step();
    };
    step(once, {once.layer->weight, once.layer->bias});
    step(twice, twice.parameters());
    EXPECT_EQ(difference(net, once), 0);
    EXPECT_EQ(difference(net, twice), 0.25);
  });
}

// A schedule for any optimizer: the class of the options tells which one is wrapped.
TEST_P(FromLibtorchTest, ACastToTheWrappedClassIsNullAndOneOfItsOptionsIsNot) {
  run([](const Group& group, const ZeroOptions& options) {
    Net net(1), plain(1);
    ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
    const auto reference = adam(plain.parameters());
    const auto set_rate = [](torch::optim::Optimizer& any, double rate) {
      for (auto& g : any.param_groups()) {
        auto* const of_adam = dynamic_cast<torch::optim::AdamOptions*>(&g.options());
        ASSERT_NE(of_adam, nullptr);
        of_adam->lr(rate);
      }
    };
    torch::optim::Optimizer& base = optimizer;
    EXPECT_EQ(dynamic_cast<torch::optim::Adam*>(&base), nullptr);
    for (int step = 0; step < 3; ++step) {
      const Batch batch(step);
      if (step == 1) base.state().clear();  // of the base class, which has no moments
      set_rate(base, kLearningRate / (1 + step));
      set_rate(*reference, kLearningRate / (1 + step));
      optimizer.backward(loss(net, batch));
      base.step();
      reference->zero_grad();
      loss(plain, batch).backward();
      reference->step();
    }
    EXPECT_LT(difference(net, plain), kRounding);
  });
}

// Sharpness-aware minimisation: the gradient of a step is that at a point up the slope.
TEST_P(FromLibtorchTest, ParametersMoveAlongTheGradientForASecondPass) {
  run([](const Group& group, const ZeroOptions& options) {
    constexpr double kRho = 0.05;
    Net net(1), plain(1);
    ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
    const auto reference = adam(plain.parameters());
    // Returns the values before the move.
    const auto climb = [](const std::vector<at::Tensor>& parameters,
                          const std::vector<at::Tensor>& gradients, double norm) {
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> before;
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor p = parameters[i];
        before.push_back(p.clone());
        p.add_(gradients[i], kRho / norm);
      }
      return before;
    };
    const auto put_back = [](const std::vector<at::Tensor>& parameters,
                             const std::vector<at::Tensor>& values) {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) {
        at::Tensor p = parameters[i];
        p.copy_(values[i]);
      }
    };
    for (int step = 0; step < 4; ++step) {
      const Batch batch(step);
      optimizer.backward(loss(net, batch.part_of(group)));
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& p : net.parameters()) gradients.push_back(optimizer.gradient(p));
      const auto before = climb(net.parameters(), gradients, optimizer.grad_norm().item<double>());
      optimizer.zero_grad();
      optimizer.backward(loss(net, batch.part_of(group)));
      put_back(net.parameters(), before);
      optimizer.refresh_working_parameters();
      optimizer.step();

      reference->zero_grad();
      loss(plain, batch).backward();
      gradients.clear();
      double squares = 0.0;
      for (const at::Tensor& p : plain.parameters()) {
        gradients.push_back(p.grad().clone());
        squares += p.grad().to(at::kDouble).square().sum().item<double>();
      }
      const auto values = climb(plain.parameters(), gradients, std::sqrt(squares));
      reference->zero_grad();
      loss(plain, batch).backward();
      put_back(plain.parameters(), values);
      reference->step();
      EXPECT_LT(difference(net, plain), kRounding) << step;
    }
  });
}

// An average of one's own that is validated, or noise for one forward pass. In a step the masters
// of 16-bit parameters move by less than these can.
TEST_P(FromLibtorchTest, ParametersThatWereAwayForAWhileKeepTheirMasters) {
  enum After { kNothing, kRefreshWorking, kRefreshMasters };
  run([](const Group& group, const ZeroOptions& options) {
    std::vector<at::Tensor> masters[3];
    for (const After after : {kNothing, kRefreshWorking, kRefreshMasters}) {
      Net net(1);
      net.to(at::kBFloat16);
      ZeroOptimizer optimizer(net, std::make_unique<torch::optim::SGD>(net.parameters(), 1e-4),
                              group, options);
      for (int step = 0; step < 6; ++step) {
        Batch part = Batch(step).part_of(group);
        part.x = part.x.to(at::kBFloat16);
        part.y = part.y.to(at::kBFloat16);
        optimizer.backward(loss(net, part));
        optimizer.step();
        if (after == kNothing) continue;
        const at::NoGradGuard no_grad;
        for (at::Tensor& p : net.parameters()) {
          const at::Tensor before = p.clone();
          p.add_(1);
          p.copy_(before);
        }
        after == kRefreshWorking ? optimizer.refresh_working_parameters()
                                 : optimizer.refresh_master_parameters();
      }
      for (const at::Tensor& p : net.parameters()) masters[after].push_back(optimizer.master(p));
    }
    for (size_t p = 0; p < masters[kNothing].size(); ++p) {
      EXPECT_TRUE(at::equal(masters[kRefreshWorking][p], masters[kNothing][p])) << p;
      EXPECT_FALSE(at::equal(masters[kRefreshMasters][p], masters[kNothing][p])) << p;
    }
  });
}

struct Words : torch::nn::Module {
  explicit Words(const torch::nn::EmbeddingOptions& options)
      : embedding(register_module("embedding", torch::nn::Embedding(options))) {
    at::NoGradGuard no_grad;
    embedding->weight.copy_(random_tensor({19, 5}, 1));
  }
  torch::nn::Embedding embedding;
};

// libtorch's layer writes into its weight in each forward pass. The two ways of the page in its
// place: no row is ever longer, or none that is looked up.
TEST_P(FromLibtorchTest, AnEmbeddingWithMaxNormIsRefusedAndTheTwoOthersTrain) {
  constexpr double kMaxNorm = 0.5;
  const at::Tensor words = at::arange(12);
  run([&](const Group& group, const ZeroOptions& options) {
    const at::Tensor own = words.tensor_split(group.world_size())[group.rank()];
    Words refused(torch::nn::EmbeddingOptions(19, 5).max_norm(kMaxNorm));
    ZeroOptimizer refuses(refused, adam(refused.parameters()), group, options);
    refuses.backward(refused.embedding(own).square().mean());
    try {
      refuses.step();
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_NE(text.find("embedding.weight"), std::string::npos) << text;
      EXPECT_NE(text.find("max_norm"), std::string::npos) << text;
    }
    for (const bool after_steps : {true, false}) {
      const torch::nn::EmbeddingOptions plain_rows(19, 5);
      Words net(plain_rows), plain(plain_rows);
      const auto loss_of = [&](Words& of, const at::Tensor& looked_up) {
        const at::Tensor& weight = of.embedding->weight;
        const at::Tensor rows =
            at::embedding(after_steps ? weight : at::renorm(weight, 2, 0, kMaxNorm), looked_up);
        return (rows - 0.4).square().mean();
      };
      const auto shorten = [&](Words& of) {
        at::NoGradGuard no_grad;
        at::Tensor weight = of.embedding->weight;
        at::embedding_renorm_(weight, at::arange(weight.size(0), weight.device()), kMaxNorm, 2.0);
      };
      ZeroOptimizer optimizer(net, adam(net.parameters()), group, options);
      const auto reference = adam(plain.parameters());
      for (int step = 0; step < 4; ++step) {
        optimizer.backward(loss_of(net, own));
        optimizer.step();
        reference->zero_grad();
        loss_of(plain, words).backward();
        reference->step();
        if (after_steps) {
          shorten(net);
          optimizer.refresh_master_parameters();
          shorten(plain);
          EXPECT_LT(net.embedding->weight.norm(2, 1).max().item<double>(), kMaxNorm + 1e-4);
        }
        EXPECT_LT(difference(net, plain), kRounding) << "step " << step;
      }
    }
  });
}

}  // namespace
}  // namespace zero
