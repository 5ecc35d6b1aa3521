// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Between autograd and the buckets: hooks of the user, graphs of which only some gradients are
// wanted, gradients with a graph of their own, and the bits of a sum that is made on the way.
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "tests/support/fixed_gradients.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using torch::autograd::grad;

constexpr int kSteps = 3;
constexpr int kMicroBatches = 2;

// A model, and what a user does with it around a backward pass.
struct Net : torch::nn::Module {
  Net() : linear(6, 5) {
    register_module("linear", linear);
    at::NoGradGuard no_grad;
    uint64_t seed = 1;
    for (at::Tensor& p : parameters()) p.copy_(random_tensor(p.sizes(), seed++) * 0.3);
  }
  at::Tensor loss(const at::Tensor& x) { return linear(x).tanh().pow(2).sum(); }
  torch::nn::Linear linear;
};

struct User {
  std::function<void(Net&)> before = [](Net&) {};  // the optimizer is made
  std::function<void(Net&)> after = [](Net&) {};
  // Makes the graph of a loss.
  std::function<at::Tensor(Net&, const at::Tensor& x)> loss = [](Net& net, const at::Tensor& x) {
    return net.loss(x);
  };
};

at::Tensor batch(int rank, int step, int micro) {
  return random_tensor({3, 6}, static_cast<uint64_t>(100 * rank + 10 * step + micro));
}

std::vector<at::Tensor> values(const Net& net) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : net.parameters()) result.push_back(p.detach().clone());
  return result;
}

// The parameters after each step, by plain torch.
std::vector<std::vector<at::Tensor>> plain(const User& user, int world_size) {
  Net net;
  user.before(net);
  user.after(net);
  torch::optim::SGD sgd(net.parameters(), 0.1);
  std::vector<std::vector<at::Tensor>> result;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> sums(net.parameters().size());
    for (int rank = 0; rank < world_size; ++rank) {
      sgd.zero_grad();
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        user.loss(net, batch(rank, step, micro)).backward();
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        const at::Tensor& gradient = net.parameters()[i].grad();
        sums[i] = sums[i].defined() ? sums[i] + gradient : gradient.clone();
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      net.parameters()[i].mutable_grad() = sums[i] / world_size;
    }
    sgd.step();
    result.push_back(values(net));
  }
  return result;
}

void expect_trains_as_plain_torch(const User& user) {
  for (int world_size : {1, 2, 3}) {
    const auto expected = plain(user, world_size);
    for (int64_t stage : {1, 2}) {
      for (bool no_sync : {false, true}) {
        SCOPED_TRACE(c10::str(world_size, " ranks, stage ", stage, no_sync ? ", no_sync" : ""));
        run_ranks(world_size, [&](const Group& group) {
          Net net;
          user.before(net);
          ZeroOptimizer optimizer(net, std::make_unique<torch::optim::SGD>(net.parameters(), 0.1),
                                  group, ZeroOptions().stage(stage));
          user.after(net);
          for (int step = 0; step < kSteps; ++step) {
            for (int micro = 0; micro < kMicroBatches; ++micro) {
              const auto guard = optimizer.no_sync(no_sync && micro == 0);
              optimizer.backward(user.loss(net, batch(group.rank(), step, micro)));
              // In stage 1, p.grad() then holds an average, which the next gradient must replace.
              if (!no_sync) optimizer.reduce_gradients();
            }
            optimizer.step();
            const auto got = values(net);
            for (size_t i = 0; i < got.size(); ++i) {
              EXPECT_TRUE(at::allclose(got[i], expected[step][i], 1e-5, 1e-6))
                  << "parameter " << i << ", step " << step;
            }
          }
        });
      }
    }
  }
}

TEST(AutogradTest, HooksOfTheUserHaveTheirSayWheneverRegistered) {
  User user;
  user.before = [](Net& net) {
    net.linear->weight.register_hook([](const at::Tensor& g) { return g.clamp(-0.1, 0.1); });
  };
  user.after = [](Net& net) {
    net.linear->weight.register_hook([](const at::Tensor& g) { return g + 0.05; });
    net.linear->bias.register_hook([](const at::Tensor& g) { return g * 3; });
  };
  expect_trains_as_plain_torch(user);
}

TEST(AutogradTest, OptimizersLeaveNothingMoreInTheHooksOfAParameter) {
  run_ranks(1, [](const Group& group) {
    Net net;
    for (int i = 0; i < 3; ++i) {
      ZeroOptimizer optimizer(net, std::make_unique<torch::optim::SGD>(net.parameters(), 0.1),
                              group, ZeroOptions());
      optimizer.freeze({net.linear->bias});
      optimizer.unfreeze({net.linear->bias}, 0);
    }
    for (const at::Tensor& p : net.parameters()) {
      const auto* const meta = torch::autograd::impl::get_autograd_meta(p);
      EXPECT_EQ(meta->cpp_hooks_list_->size(), 1U) << "engines since the first one left more";
    }
  });
}

TEST(AutogradTest, GradientsAskedForByTheUserAreTheUsers) {
  User user;
  user.loss = [](Net& net, const at::Tensor& x) {
    const at::Tensor loss = net.loss(x);
    const auto gradients = grad({loss}, {net.linear->weight, net.linear->bias}, {}, true);
    EXPECT_TRUE(gradients[0].defined() && gradients[1].defined());
    return loss * (1 + gradients[0].abs().max());
  };
  expect_trains_as_plain_torch(user);
}

TEST(AutogradTest, PenaltyOnAGradient) {
  User user;
  user.loss = [](Net& net, const at::Tensor& x) {
    const at::Tensor loss = net.loss(x);
    const auto gradient = grad({loss}, {net.linear->weight}, {}, true, /*create_graph=*/true);
    return loss + 0.1 * gradient[0].pow(2).sum();
  };
  expect_trains_as_plain_torch(user);
}

// Mixed precision as torch's own autocast does it: fp32 parameters, of which the forward pass makes
// bf16 copies.
TEST(AutogradTest, Autocast) {
  struct Bfloat16 {
    Bfloat16() {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    }
    ~Bfloat16() {
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
    }
  };
  User user;
  user.loss = [](Net& net, const at::Tensor& x) {
    const Bfloat16 autocast;
    const at::Tensor y = net.linear(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    return y.to(at::kFloat).tanh().pow(2).sum();
  };
  expect_trains_as_plain_torch(user);
}

// What no_sync kept is added to the last gradient on its way into a bucket, with the bits of adding
// it before.
void expect_sum_of_two(at::ScalarType dtype, bool no_sync_fp32, bool reduce_fp32) {
  SCOPED_TRACE(c10::str(dtype, no_sync_fp32 ? " no_sync_fp32" : "", reduce_fp32 ? " reduced" : ""));
  ZeroOptions options;
  options.loss_scaler(LossScalerOptions().initial_scale(1)).no_sync_fp32(no_sync_fp32);
  if (reduce_fp32) options.reduce_dtype(at::kFloat);
  run_ranks(1, [&](const Group& group) {
    const at::Tensor initial = random_tensor({1001}, 1).to(dtype);
    const at::Tensor first = random_tensor({1001}, 2).to(dtype),
                     second = random_tensor({1001}, 3).to(dtype);
    GivenGradients model({initial});
    ZeroOptimizer optimizer(model, std::make_unique<torch::optim::SGD>(model.values, 1.0), group,
                            options);
    at::Tensor held;
    {
      const auto guard = optimizer.no_sync();
      optimizer.backward(model.loss({first}));
      held = model.values[0].grad();
    }
    const bool wide = no_sync_fp32 && dtype != at::kFloat;
    ASSERT_TRUE(held.defined());
    EXPECT_EQ(held.isnan().all().item<bool>(), wide) << "a marker";
    optimizer.backward(model.loss({second}));
    if (!wide) {
      // In another dtype than the bucket's the sum is rounded in p.grad() first.
      const bool apart = reduce_fp32 && dtype != at::kFloat;
      EXPECT_TRUE(at::equal(held, apart ? first + second : first));
    }
    optimizer.step();
    at::Tensor sum = first + second;
    if (wide) {
      sum = first.to(at::kFloat) + second.to(at::kFloat);
      if (!reduce_fp32) sum = sum.to(dtype);
    }
    const at::Tensor master = initial.to(at::kFloat) - sum.to(at::kFloat);
    EXPECT_TRUE(at::equal(optimizer.master(model.values[0]), master));
  });
}

TEST(AutogradTest, TheLastGradientIsAddedOnTheWay) {
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (bool no_sync_fp32 : {false, true}) {
      for (bool reduce_fp32 : {false, true}) expect_sum_of_two(dtype, no_sync_fp32, reduce_fp32);
    }
  }
}

}  // namespace
}  // namespace zero
