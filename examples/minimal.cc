// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The least a trainer needs, next to the same training in one process.
//
// Usage:
//   ./bazelw run //examples:minimal
//
// Expected output (the last digits differ between machines):
//   step  0  gradient norm 0.4486
//   step 25  gradient norm 0.3697
//   2 ranks and one process differ by at most 6.0e-08 in a parameter
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
// they must be equally large: 48 sequences suit 1, 2, 3, 4, 6, 8, 12 and 24 ranks.
at::Tensor loss(torch::nn::Sequential& model, int step, int64_t piece, int64_t pieces) {
  torch::manual_seed(step);  // every rank draws the same batch and takes its part
  const at::Tensor x = torch::randn({kBatch, 13});
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

int train() {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  torch::nn::Sequential model = make_model();
  auto adamw = std::make_unique<torch::optim::AdamW>(model->parameters(), kLearningRate);
  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group, zero::ZeroOptions().stage(2));
  zero::LrSchedule schedule(optimizer, zero::step_decay(/*step_size=*/20, /*gamma=*/0.5));

  const int64_t pieces = group.world_size() * kMicroBatches;
  TORCH_CHECK(kBatch % pieces == 0, "minimal: expected a divisor of ", kBatch / kMicroBatches,
              " ranks, got ", group.world_size());
  for (int step = 0; step < kSteps; ++step) {
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      const auto guard = optimizer.no_sync(micro + 1 < kMicroBatches);  // send with the last one
      const int64_t piece = group.rank() * kMicroBatches + micro;
      optimizer.backward(loss(model, step, piece, pieces) / kMicroBatches);
    }
    const at::Tensor norm = optimizer.clip_grad_norm_(1.0);
    optimizer.step();  // consumes the gradients: no zero_grad()
    schedule.step();
    if (group.rank() == 0 && step % 25 == 0) {
      std::printf("step %2d  gradient norm %.4f\n", step, norm.item<double>());
    }
  }

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
    return zero::launch_local(2, train);
  } catch (const c10::Error& error) {
    // Not what(), which adds a C++ backtrace.
    std::fprintf(stderr, "minimal: %s\n", error.what_without_backtrace());
    return 1;
  }
}
