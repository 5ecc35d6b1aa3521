// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A weight whose gradient arrives several times in one pass, as activation checkpointing makes it,
// beside plain torch.
#include <ATen/Functions.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Body = std::function<at::Tensor(const at::Tensor&)>;

// Activation checkpointing in small: keeps its input only, and runs `body` again
// when its gradient is asked for, with a backward pass inside the backward pass.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const Body* body) {
    context->save_for_backward({x});
    context->saved_data["body"] = reinterpret_cast<int64_t>(body);
    return (*body)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* body = reinterpret_cast<const Body*>(context->saved_data["body"].toInt());
    const at::AutoGradMode enable(true);
    std::optional<at::ThreadLocalStateGuard> as_before;
    if (state != nullptr) as_before.emplace(*state);
    at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({(*body)(x)}, gradients);
    return {x.grad(), at::Tensor()};
  }

  // Of before the pass, under which it computes again; or null.
  static thread_local const at::ThreadLocalState* state;
};
thread_local const at::ThreadLocalState* Recompute::state = nullptr;

// `shared` is used outside of the checkpointed parts and in both of them.
struct CheckpointedModel : torch::nn::Module {
  CheckpointedModel() {
    const auto add = [&](const char* name, at::IntArrayRef shape, uint64_t seed) {
      return register_parameter(name, random_tensor(shape, seed) * 0.4);
    };
    first = add("first", {9, 9}, 1);
    shared = add("shared", {9, 9}, 2);
    second = add("second", {9, 9}, 3);
    bias = add("bias", {9}, 4);
    never = add("never", {31}, 5);
  }
  at::Tensor loss(const at::Tensor& x) const {
    at::Tensor h = at::tanh(at::matmul(at::matmul(x, first), shared));
    h = Recompute::apply(h, &inner_part);
    h = Recompute::apply(h, &outer_part);
    return at::mean(at::pow(at::matmul(h, shared), 2));
  }

  at::Tensor first, shared, second, bias, never;
  Body inner_part = [this](const at::Tensor& h) { return at::tanh(at::matmul(h, shared) + bias); };
  Body outer_part = [this](const at::Tensor& h) {
    return at::tanh(at::matmul(at::matmul(h, second), shared) + bias);
  };
};

struct CheckpointedRun {
  int world_size = 2;
  bool plain = false;
  bool no_sync = false;
  bool as_before = false;  // in what is computed again: autocast, and all else of the thread
  ZeroOptions options;
};

constexpr int kSteps = 3;
constexpr int kMicroBatches = 2;

at::Tensor checkpointed_batch(int rank, int step, int micro) {
  return random_tensor({4, 9}, 1000u + static_cast<unsigned>(100 * rank + 10 * step + micro));
}

std::unique_ptr<torch::optim::Optimizer> sgd_of(const CheckpointedModel& model) {
  return std::make_unique<torch::optim::SGD>(model.parameters(),
                                             torch::optim::SGDOptions(0.2).momentum(0.9));
}

void append(Trajectory& trajectory, const CheckpointedModel& model) {
  trajectory.emplace_back();
  for (const at::Tensor& p : model.parameters()) trajectory.back().push_back(p.detach().clone());
}

Trajectory checkpointed_reference(int world_size) {
  CheckpointedModel model;
  const auto inner = sgd_of(model);
  Trajectory trajectory;
  for (int step = 0; step < kSteps; ++step) {
    inner->zero_grad();
    for (int rank = 0; rank < world_size; ++rank) {
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        (model.loss(checkpointed_batch(rank, step, micro)) / world_size).backward();
      }
    }
    inner->step();
    append(trajectory, model);
  }
  return trajectory;
}

Trajectory checkpointed_on_ranks(const CheckpointedRun& t) {
  std::vector<Trajectory> all(t.world_size);
  run_ranks(t.world_size, [&](const Group& group) {
    CheckpointedModel model;
    int firings = 0;
    model.shared.register_hook([&](const at::Tensor&) { ++firings; });
    ZeroOptimizer optimizer(model, sgd_of(model), group, t.options);
    const at::ThreadLocalState before;
    if (t.as_before) Recompute::state = &before;
    for (int step = 0; step < kSteps; ++step) {
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        const auto guard = optimizer.no_sync(t.no_sync && micro == 0);
        const at::Tensor loss = model.loss(checkpointed_batch(group.rank(), step, micro));
        firings = 0;
        t.plain ? optimizer.scale_loss(loss).backward() : optimizer.backward(loss);
        EXPECT_EQ(firings, 3) << "the model does not do what this test is about";
      }
      optimizer.step();
      append(all[group.rank()], model);
    }
  });
  for (const Trajectory& t : all) EXPECT_EQ(differing_elements(t, all[0]), 0);
  return all[0];
}

class CheckpointedAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, CheckpointedAt, ::testing::Values(1, 2, 3));

TEST_P(CheckpointedAt, SharedWeightThatFiresSeveralTimesEqualsPlainTorch) {
  const Trajectory reference = checkpointed_reference(GetParam());
  for (bool plain : {false, true}) {
    for (bool no_sync : {false, true}) {
      std::optional<Trajectory> first;
      for (int64_t stage : {1, 2}) {
        for (int64_t bucket_bytes : {int64_t{0}, int64_t{128}, int64_t{700}}) {
          CheckpointedRun t;
          t.world_size = GetParam();
          t.plain = plain;
          t.no_sync = no_sync;
          t.as_before = bucket_bytes == 700;
          t.options.stage(stage)
              .bucket_bytes(bucket_bytes)
              .layout(bucket_bytes == 128 ? Layout::kPerParameter : Layout::kContiguous);
          SCOPED_TRACE("stage " + std::to_string(stage) + " bucket " +
                       std::to_string(bucket_bytes) + (plain ? " plain" : " own") +
                       (no_sync ? " no_sync" : ""));
          const Trajectory ours = checkpointed_on_ranks(t);
          EXPECT_LE(largest_difference(ours, reference), 1e-6);
          if (!first) first = ours;
          EXPECT_EQ(differing_elements(ours, *first), 0)
              << "stages and bucket sizes must give the same bits";
        }
      }
    }
  }
}

}  // namespace
}  // namespace zero
