// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A project outside of this repository: two ranks train a layer as one process does. Its build
// files are those that docs/building.md shows.
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "zero/zero.h"

namespace {

constexpr int kSteps = 20;

// Rank r of W sees inputs of value 1 + r / W.
at::Tensor loss(torch::nn::Linear& model, double value) {
  return at::mse_loss(model->forward(at::ones({3, 4}) * value), at::ones({3, 2}));
}

torch::nn::Linear make_model() {
  torch::nn::Linear model(4, 2);
  for (at::Tensor& parameter : model->parameters()) parameter.data().fill_(0.25);
  return model;
}

int train() {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  torch::nn::Linear model = make_model();
  auto sgd = std::make_unique<torch::optim::SGD>(model->parameters(), 0.05);
  zero::ZeroOptimizer optimizer(*model, std::move(sgd), group, zero::ZeroOptions().stage(2));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.backward(loss(model, 1.0 + 1.0 * group.rank() / group.world_size()));
    optimizer.step();
  }

  torch::nn::Linear plain = make_model();
  torch::optim::SGD plain_sgd(plain->parameters(), 0.05);
  for (int step = 0; step < kSteps; ++step) {
    plain_sgd.zero_grad();
    for (int rank = 0; rank < group.world_size(); ++rank) {
      (loss(plain, 1.0 + 1.0 * rank / group.world_size()) / group.world_size()).backward();
    }
    plain_sgd.step();
  }
  const double difference = (model->weight - plain->weight).abs().max().item<double>();
  const double moved = (model->weight - make_model()->weight).abs().max().item<double>();
  if (group.rank() == 0) {
    std::printf("%s: %d ranks and one process %s\n", zero::version_string().c_str(),
                group.world_size(), difference < 1e-6 && moved > 1e-3 ? "agree" : "differ");
  }
  return difference < 1e-6 && moved > 1e-3 ? 0 : 1;
}

}  // namespace

int main() { return zero::launch_local(2, train); }
