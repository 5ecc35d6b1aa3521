// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The least a trainer needs, next to the same training in one process.
//
// Usage:
//   ./bazelw run //examples:minimal
//
// Expected output (the last digits differ between machines):
//   step  0  loss 1.1302  gradient norm 0.4486
//   step 25  loss 0.7893  gradient norm 0.3697
//   2 ranks and one process differ by at most 6.0e-08 in a parameter
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "zero/launch.h"
#include "zero/lr_schedule.h"
#include "zero/zero_optimizer.h"

namespace {

constexpr int kSteps = 50;
constexpr int kBatch = 48;
constexpr int kMicroBatches = 2;  // of every rank
constexpr double kLearningRate = 1e-2;

torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(13, 37), torch::nn::GELU(),
                               torch::nn::Linear(37, 5));
}

// The mean loss over piece `piece` of the `pieces` that step `step`'s batch is cut into;
// they must be equally large: 48 examples suit 1, 2, 3, 4, 6, 8, 12 and 24 ranks.
at::Tensor loss(torch::nn::Sequential& model, int step, int64_t piece, int64_t pieces) {
  // Every rank draws the same batch and takes its part, with a generator of its own: the global
  // one, which dropout would use, must differ between ranks.
  const auto random = at::make_generator<at::CPUGeneratorImpl>(step);
  const at::Tensor x = at::randn({kBatch, 13}, random);
  const at::Tensor y = x.narrow(1, 0, 5) * x.narrow(1, 5, 5);
  return torch::mse_loss(model->forward(x.chunk(pieces)[piece]), y.chunk(pieces)[piece]);
}

// The reference: plain torch in one process, the whole batch at once.
torch::nn::Sequential train_plainly() {
  torch::nn::Sequential model = make_model();
  torch::optim::AdamW optimizer(model->parameters(), kLearningRate);
  zero::LrSchedule schedule(optimizer, zero::step_decay(/*step_size=*/20, /*gamma=*/0.5));
  for (int step = 0; step < kSteps; ++step) {
    loss(model, step, 0, 1).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    schedule.step();
  }
  return model;
}

torch::nn::Sequential train(const zero::Group& group) {
  torch::nn::Sequential model = make_model();
  torch::manual_seed(1234 + group.rank());
  auto adamw = std::make_unique<torch::optim::AdamW>(model->parameters(), kLearningRate);
  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group, zero::ZeroOptions().stage(2));
  zero::LrSchedule schedule(optimizer, zero::step_decay(/*step_size=*/20, /*gamma=*/0.5));

  const int64_t pieces = group.world_size() * kMicroBatches;
  TORCH_CHECK(kBatch % pieces == 0, "minimal: expected a divisor of ", kBatch / kMicroBatches,
              " ranks, got ", group.world_size());
  for (int step = 0; step < kSteps; ++step) {
    at::Tensor total = at::zeros({});
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      const auto guard = optimizer.no_sync(micro + 1 < kMicroBatches);  // send with the last one
      const int64_t piece = group.rank() * kMicroBatches + micro;
      const at::Tensor part = loss(model, step, piece, pieces) / kMicroBatches;
      optimizer.backward(part);
      total += part.detach();
    }
    const at::Tensor norm = optimizer.clip_grad_norm_(1.0);
    optimizer.step();  // consumes the gradients: no zero_grad()
    schedule.step();
    if (step % 25 == 0) {
      const at::Tensor shown =
          zero::mean_over_ranks(total, group);  // by all ranks, or it would hang
      if (group.rank() == 0) {
        std::printf("step %2d  loss %.4f  gradient norm %.4f\n", step, shown.item<double>(),
                    norm.item<double>());
      }
    }
  }
  return model;
}

int compare() {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  torch::nn::Sequential model = train(group);
  torch::nn::Sequential reference = train_plainly();
  double gap = 0.0;
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    const at::Tensor difference = model->parameters()[i] - reference->parameters()[i];
    gap = std::max(gap, difference.abs().max().item<double>());
  }
  if (group.rank() == 0) {
    std::printf("%d ranks and one process differ by at most %.1e in a parameter\n",
                group.world_size(), gap);
  }
  return gap < 1e-5 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return zero::launch_local(2, compare);
  } catch (const c10::Error& error) {
    // Not what(), which adds a C++ backtrace.
    std::fprintf(stderr, "minimal: %s\n", error.what_without_backtrace());
    return 1;
  }
}
