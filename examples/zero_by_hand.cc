// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// ZeRO-2 in one page, without the library: what a ZeroOptimizer does in a step, for those who want
// to understand it first. Both train the same model, and their parameters are compared bit by bit.
//
// Usage:
//   ./bazelw run //examples:zero_by_hand
//
// Expected output:
//   by hand: 4 ranks, 674 parameters padded to 676, 169 of them on each rank
//   20 steps by hand and with zero::ZeroOptimizer: the same bits
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace {

constexpr int kRanks = 4;
constexpr int kSteps = 20;
constexpr double kLearningRate = 1e-2, kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8;
constexpr double kWeightDecay = 0.01, kMaxNorm = 0.1;

torch::nn::Sequential make_model() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(11, 39), torch::nn::GELU(),
                               torch::nn::Linear(39, 5), torch::nn::Linear(5, 1));
}

// The loss of a rank's part of the batch.
at::Tensor loss(torch::nn::Sequential& model, int step, int rank) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(step * kRanks + rank);
  const at::Tensor x = at::randn({8, 11}, random);
  return torch::mse_loss(model->forward(x), x.sum(1, /*keepdim=*/true));
}

// ---------------------------------------------------------------------
// By hand

// What NCCL or Gloo do between processes. Ranks are threads here, which read each other's memory.
class Network {
 public:
  // Returns the sum of all ranks' rows `rank`, added in the order of ranks. `bucket` has a row for
  // each rank.
  at::Tensor reduce_scatter(int rank, const at::Tensor& bucket) {
    show(rank, bucket);
    at::Tensor sum = shown_[0][rank].clone();
    for (int r = 1; r < kRanks; ++r) sum += shown_[r][rank];
    barrier_.arrive_and_wait();  // all have read
    return sum;
  }
  // Fills row r with rank r's row r.
  void all_gather(int rank, at::Tensor& bucket) {
    show(rank, bucket);
    for (int r = 0; r < kRanks; ++r) {
      if (r != rank) bucket[r].copy_(shown_[r][r]);
    }
    barrier_.arrive_and_wait();
  }
  double all_reduce_sum(int rank, double value) {
    const at::Tensor row = at::full({1}, value, at::kDouble);
    return reduce_scatter(rank, row.expand({kRanks, 1})).item<double>();
  }

 private:
  void show(int rank, const at::Tensor& bucket) {
    shown_[rank] = bucket;
    barrier_.arrive_and_wait();
  }

  std::vector<at::Tensor> shown_{kRanks};
  std::barrier<> barrier_{kRanks};
};

void train_by_hand(torch::nn::Sequential& model, int rank, Network& network) {
  const std::vector<at::Tensor> parameters = model->parameters();

  // 1. Pad the parameters to a multiple of the number of ranks and cut them into a row for each.
  int64_t numel = 0;
  for (const at::Tensor& p : parameters) numel += p.numel();
  const int64_t part = (numel + kRanks - 1) / kRanks;
  at::Tensor bucket = at::zeros({kRanks, part});
  if (rank == 0) {
    std::printf("by hand: %d ranks, %d parameters padded to %d, %d of them on each rank\n", kRanks,
                static_cast<int>(numel), static_cast<int>(kRanks * part), static_cast<int>(part));
  }
  const auto copy = [&](auto&& one) {
    at::NoGradGuard no_grad;
    int64_t begin = 0;
    for (const at::Tensor& p : parameters) {
      one(p, bucket.view({-1}).narrow(0, begin, p.numel()).view_as(p));
      begin += p.numel();
    }
  };
  copy([](const at::Tensor& p, const at::Tensor& place) { place.copy_(p); });

  // 2. Each rank holds the fp32 master and the optimizer's state of its own row alone: this is
  //    where the memory is saved.
  at::Tensor master = bucket[rank].clone();
  at::Tensor exp_avg = at::zeros({part}), exp_avg_sq = at::zeros({part});

  for (int step = 1; step <= kSteps; ++step) {
    // 3. Gradients of this rank's part of the batch. A layer that was not used has none: zeros.
    loss(model, step, rank).backward();
    copy([](const at::Tensor& p, const at::Tensor& place) {
      p.grad().defined() ? place.copy_(p.grad()) : place.zero_();
      p.mutable_grad().reset();
    });

    // 4. Sum them over the ranks; each rank keeps the mean of its row.
    at::Tensor gradient = network.reduce_scatter(rank, bucket) * (1.0 / kRanks);

    // 5. The norm of all gradients from the rows, and one factor for all of them.
    const double squares = gradient.to(at::kDouble).square().sum().item<double>();
    const double norm = std::sqrt(network.all_reduce_sum(rank, squares));
    gradient *= std::min(1.0, kMaxNorm / (norm + 1e-6));

    // 6. AdamW on the row.
    const double correction1 = 1 - std::pow(kBeta1, step);
    const double correction2 = 1 - std::pow(kBeta2, step);
    master *= 1 - kLearningRate * kWeightDecay;
    exp_avg = exp_avg * kBeta1 + gradient * (1 - kBeta1);
    exp_avg_sq = exp_avg_sq * kBeta2 + gradient * (1 - kBeta2) * gradient;
    // In double, because libtorch's root of a float is not always the nearest float.
    const at::Tensor root = exp_avg_sq.to(at::kDouble).sqrt().to(at::kFloat);
    master += exp_avg * (-kLearningRate / correction1) / (root / std::sqrt(correction2) + kEpsilon);

    // 7. Every rank gets the rows of the others and has the new parameters.
    bucket[rank].copy_(master);
    network.all_gather(rank, bucket);
    copy([](const at::Tensor& p, const at::Tensor& place) { p.copy_(place); });
  }
}

// ---------------------------------------------------------------------
// With the library

torch::nn::Sequential train_with_zero(const zero::Group& group) {
  torch::nn::Sequential model = make_model();
  auto adamw = std::make_unique<torch::optim::AdamW>(
      model->parameters(),
      torch::optim::AdamWOptions(kLearningRate).eps(kEpsilon).weight_decay(kWeightDecay));
  zero::ZeroOptimizer optimizer(*model, std::move(adamw), group, zero::ZeroOptions().stage(2));
  for (int step = 1; step <= kSteps; ++step) {
    optimizer.backward(loss(model, step, group.rank()));
    optimizer.clip_grad_norm_(kMaxNorm);
    optimizer.step();
  }
  return model;
}

bool same_bits(const torch::nn::Sequential& a, const torch::nn::Sequential& b) {
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    if (!at::equal(a->parameters()[i], b->parameters()[i])) return false;
  }
  return true;
}

int compare() {
  at::set_num_threads(1);
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  TORCH_CHECK(group.world_size() == kRanks, "zero_by_hand: expected ", kRanks, " ranks, got ",
              group.world_size());
  const torch::nn::Sequential with_zero = train_with_zero(group);
  if (group.rank() != 0) return 0;

  Network network;
  std::vector<torch::nn::Sequential> models;
  for (int rank = 0; rank < kRanks; ++rank) models.push_back(make_model());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] { train_by_hand(models[rank], rank, network); });
  }
  for (std::thread& rank : ranks) rank.join();

  bool same = true;
  for (const torch::nn::Sequential& by_hand : models) same = same && same_bits(by_hand, with_zero);
  std::printf("%d steps by hand and with zero::ZeroOptimizer: %s\n", kSteps,
              same ? "the same bits" : "DIFFERENT");
  return same ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return zero::launch_local(kRanks, compare);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "zero_by_hand: %s\n", error.what_without_backtrace());
    return 1;
  }
}
