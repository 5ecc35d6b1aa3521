// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Parameters of no module: given by name, they train as plain torch trains them, and are what a
// module with the same names is.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <filesystem>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// A fit of points as programs write it that have no module.
struct Points {
  at::Tensor means = random_tensor({37, 2}, 1).set_requires_grad(true);
  at::Tensor scales = random_tensor({37}, 2).set_requires_grad(true);
  at::Tensor unused = random_tensor({5}, 3).set_requires_grad(true);
  at::Tensor background = random_tensor({3}, 4);  // frozen
  at::Tensor seen = random_tensor({3}, 5);        // a buffer

  at::Tensor loss(const at::Tensor& targets) const {
    return ((means * scales.exp().unsqueeze(1)).tanh() - targets).pow(2).sum() +
           0 * background.sum();
  }
  std::vector<at::Tensor> trained() const { return {means, scales, unused}; }
  NamedTensors named() const {
    NamedTensors result;
    result.insert("means", means);
    result.insert("shape.scales", scales);
    result.insert("shape.unused", unused);
    result.insert("background", background);
    return result;
  }
  NamedTensors buffers() const {
    NamedTensors result;
    result.insert("seen", seen);
    return result;
  }
};

at::Tensor targets(int rank, int step) {
  return random_tensor({37, 2}, static_cast<uint64_t>(100 + 10 * step + rank)) * 0.5;
}

std::unique_ptr<torch::optim::Optimizer> make(bool adam, const std::vector<at::Tensor>& tensors) {
  if (adam) return std::make_unique<AdamW>(tensors, AdamWOptions(0.01));
  return std::make_unique<SGD>(tensors, SGDOptions(0.05).momentum(0.9));
}

// Of plain torch, by step.
std::vector<std::vector<at::Tensor>> plain(bool adam, int world_size, int steps) {
  Points points;
  const auto optimizer = make(adam, points.trained());
  std::vector<std::vector<at::Tensor>> result;
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    at::Tensor sum;
    for (int rank = 0; rank < world_size; ++rank) {
      const at::Tensor loss = points.loss(targets(rank, step));
      sum = sum.defined() ? sum + loss : loss;
    }
    (sum / world_size).backward();
    optimizer->step();
    std::vector<at::Tensor> values;
    for (const at::Tensor& p : points.trained()) values.push_back(p.detach().clone());
    result.push_back(values);
  }
  return result;
}

class NamedTensorsAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, NamedTensorsAt, ::testing::Values(1, 2, 3, 4));

TEST_P(NamedTensorsAt, TrainAsPlainTorchAfterEveryStep) {
  constexpr int kSteps = 4;
  for (const bool adam : {false, true}) {
    const auto expected = plain(adam, GetParam(), kSteps);
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      run_ranks(GetParam(), [&](const Group& group) {
        Points points;
        points.seen.fill_(group.rank());
        ZeroOptimizer optimizer(points.named(), make(adam, points.trained()), group,
                                ZeroOptions().layout(layout).overlap_gather(true),
                                points.buffers());
        EXPECT_TRUE(at::equal(points.seen, at::full({3}, 0.0))) << "rank 0's buffer is sent";
        for (int step = 0; step < kSteps; ++step) {
          for (const at::Tensor& p : points.trained()) optimizer.wait_for(p);
          optimizer.backward(points.loss(targets(group.rank(), step)));
          optimizer.step();
          for (const at::Tensor& p : points.trained()) optimizer.wait_for(p);
          for (size_t i = 0; i < 3; ++i) {
            EXPECT_TRUE(points.trained()[i].allclose(expected[step][i], 1e-5, 1e-6))
                << "parameter " << i << " step " << step << " adam " << adam;
          }
        }
      });
    }
  }
}

// The names are those of a module.
TEST(NamedTensorsTest, AModuleWithTheSameNamesLoadsWhatTheySave) {
  const std::string folder = ::testing::TempDir() + "/named_tensors";
  run_ranks(2, [&](const Group& group) {
    NamedTensors named;
    named.insert("layer.weight", random_tensor({4, 3}, 1).set_requires_grad(true));
    named.insert("layer.bias", random_tensor({4}, 2).set_requires_grad(true));
    ZeroOptimizer listed(named, make(true, {named["layer.weight"], named["layer.bias"]}), group);
    listed.backward((named["layer.weight"].sum() + named["layer.bias"].sum()).pow(2));
    listed.step();
    listed.save_checkpoint(folder, SaveOptions().overwrite(true));

    torch::nn::Module module;
    torch::nn::Linear layer(3, 4);
    module.register_module("layer", layer);
    ZeroOptimizer optimizer(module, make(true, module.parameters()), group);
    optimizer.load_checkpoint(folder);
    EXPECT_TRUE(at::equal(layer->weight, named["layer.weight"]));
    EXPECT_TRUE(at::equal(layer->bias, named["layer.bias"]));
    EXPECT_TRUE(at::equal(optimizer.master(layer->bias), listed.master(named["layer.bias"])));
  });
  std::filesystem::remove_all(folder);
}

TEST(NamedTensorsTest, TheyAreFrozenAndAddedLikeThoseOfAModule) {
  run_ranks(2, [](const Group& group) {
    Points points;
    ZeroOptimizer optimizer(points.named(), make(false, points.trained()), group);
    optimizer.freeze({points.scales});
    EXPECT_FALSE(points.scales.requires_grad());
    const at::Tensor before = points.scales.clone();
    optimizer.backward(points.loss(targets(group.rank(), 0)));
    optimizer.step();
    EXPECT_TRUE(at::equal(points.scales, before));
    optimizer.unfreeze({points.scales, points.background});
    optimizer.backward(points.loss(targets(group.rank(), 1)));
    optimizer.step();
    EXPECT_FALSE(at::equal(points.scales, before));
    expect_words(error_of([&] { optimizer.add_param_group({{at::full({3}, 1.0)}}); }),
                 {"registered under no name", "tensors of its list"});
  });
}

TEST(NamedTensorsTest, UnusableListsAreRefused) {
  run_ranks(1, [](const Group& group) {
    const at::Tensor a = random_tensor({3}, 1).set_requires_grad(true);
    const auto refused = [&](const std::vector<std::pair<std::string, at::Tensor>>& list,
                             const std::vector<std::string>& words) {
      expect_words(error_of([&] {
                     NamedTensors named;
                     for (const auto& [name, tensor] : list) named.insert(name, tensor);
                     ZeroOptimizer(named, make(false, {a}), group);
                   }),
                   words);
    };
    refused({{"", a}}, {"parameter \"\""});
    refused({{"x.", a}}, {"parameter \"x.\"", "names around the dots"});
    refused({{".x", a}}, {"parameter \".x\"", "names around the dots"});
    refused({{"x", at::Tensor()}}, {"parameter \"x\"", "undefined"});
    refused({{"y", random_tensor({3}, 2)}}, {"parameter 0 of group 0", "not registered"});
    refused({{"x", a}, {"y", a.detach().set_requires_grad(true)}}, {"memory of its own"});
    NamedTensors named, buffers;
    named.insert("x", a);
    buffers.insert("x", random_tensor({3}, 2));
    expect_words(
        error_of([&] { ZeroOptimizer(named, make(false, {a}), group, ZeroOptions(), buffers); }),
        {"buffer \"x\"", "expected another name than that of a parameter"});
    expect_words(error_of([&] {
                   ZeroOptimizer optimizer(named, make(false, {a}), group);
                   optimizer.wait_for(random_tensor({3}, 9));
                 }),
                 {"rank " + std::to_string(group.rank()) +
                  ": wait_for(): expected a parameter of this optimizer"});
  });
}

}  // namespace
}  // namespace zero
