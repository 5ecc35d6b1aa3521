// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A mixture of two experts on four local ranks: dense layers on all of them, each expert on two.
// The norm by which gradients are clipped is that of the whole model, experts of other ranks
// included; the same training in one process shows it.
//
//            ep 0        ep 1
//   edp 0    rank 0      rank 1      dense: shards over ranks 0 to 3
//   edp 1    rank 2      rank 3      expert 0: over ranks 0 and 2; expert 1: over ranks 1 and 3
//
// Usage:
//   ./bazelw run //examples:hybrid_moe
//
// With an argument, a folder that does not exist yet, it saves a checkpoint there.
//
// Expected output (the last digits differ between machines):
//   step  0  gradient norm 0.412405  in one process 0.412405
//   step 25  gradient norm 0.369456  in one process 0.369456
//   4 ranks and one process differ by at most 2.7e-07 in a norm, 1.5e-06 in a parameter
#include <c10/util/Exception.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/callers_folder.h"
#include "zero/launch.h"
#include "zero/mesh.h"
#include "zero/zero_optimizer.h"

namespace {

constexpr int kSteps = 50;
constexpr int64_t kExperts = 2;
constexpr int64_t kRanks = 4;
constexpr int64_t kTokens = 48;  // of every rank
constexpr int64_t kWidth = 16;
constexpr double kLearningRate = 1e-2;
constexpr double kMaxNorm = 0.1;  // small, so that every step is clipped

// Row e of the tokens goes to the rank of expert e; row r of the result came from rank r. Its own
// inverse and its own transpose, so the gradient takes the same way.
class Exchange : public torch::autograd::Function<Exchange> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows,
                            int64_t communicator) {
    context->saved_data["communicator"] = communicator;
    return exchange(rows, communicator);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {exchange(gradients[0], context->saved_data["communicator"].toInt()), at::Tensor()};
  }

 private:
  static at::Tensor exchange(const at::Tensor& rows, int64_t communicator) {
    auto& ranks = *reinterpret_cast<zero::Communicator*>(communicator);
    const at::Tensor sent = rows.contiguous().view({rows.size(0), -1});
    at::Tensor received = at::empty_like(sent);
    ranks.exchange_rows(sent, received, "tokens").wait();
    received.select(0, ranks.rank()).copy_(sent.select(0, ranks.rank()));
    return received.view(rows.sizes());
  }
};

// With `expert_ranks`, holds the expert of this rank; without, all of them.
struct Moe : torch::nn::Module {
  explicit Moe(zero::Communicator* expert_ranks) : expert_ranks(expert_ranks) {
    torch::manual_seed(1);
    in = register_module("in", torch::nn::Linear(8, kWidth));
    gate = register_module("gate", torch::nn::Linear(kWidth, kExperts));
    out = register_module("out", torch::nn::Linear(kWidth, 4));
    for (int64_t e = 0; e < kExperts; ++e) {
      const torch::nn::Sequential expert(torch::nn::Linear(kWidth, 2 * kWidth), torch::nn::GELU(),
                                         torch::nn::Linear(2 * kWidth, kWidth));
      if (expert_ranks != nullptr && expert_ranks->rank() != e) continue;
      // The name in the whole model, by which a checkpoint finds it.
      experts.push_back(register_module("expert" + std::to_string(e), expert));
    }
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::gelu(in(x));
    const at::Tensor probability = torch::softmax(gate(hidden), 1);
    const at::Tensor chosen = torch::one_hot(probability.argmax(1), kExperts);
    std::vector<at::Tensor> rows;  // what each expert is to see, zeros for the other one's tokens
    for (int64_t e = 0; e < kExperts; ++e) rows.push_back(hidden * chosen.narrow(1, e, 1));
    const at::Tensor answers = ask(torch::stack(rows));
    at::Tensor sum = hidden;
    for (int64_t e = 0; e < kExperts; ++e) {
      sum = sum + answers[e] * (probability * chosen).narrow(1, e, 1);
    }
    return out(sum);
  }

  // [experts, tokens, width] -> the same.
  at::Tensor ask(const at::Tensor& rows) {
    if (expert_ranks == nullptr) {
      return torch::stack({experts[0]->forward(rows[0]), experts[1]->forward(rows[1])});
    }
    const auto communicator = reinterpret_cast<int64_t>(expert_ranks);
    return Exchange::apply(experts[0]->forward(Exchange::apply(rows, communicator)), communicator);
  }

  std::vector<at::Tensor> dense_parameters() const {
    std::vector<at::Tensor> list;
    for (const auto& layer : {in, gate, out}) {
      for (const at::Tensor& p : layer->parameters()) list.push_back(p);
    }
    return list;
  }

  zero::Communicator* expert_ranks;
  torch::nn::Linear in{nullptr}, gate{nullptr}, out{nullptr};
  std::vector<torch::nn::Sequential> experts;
};

// The mean over `count` ranks' tokens, from those of rank `first` on.
at::Tensor loss(Moe& model, int step, int64_t first, int64_t count) {
  torch::manual_seed(step);  // every rank draws the same batch and takes its part
  const at::Tensor x = torch::randn({kRanks * kTokens, 8});
  const at::Tensor y = x.narrow(1, 0, 4) * x.narrow(1, 4, 4);
  const at::Tensor mine = x.narrow(0, first * kTokens, count * kTokens);
  return torch::mse_loss(model.forward(mine), y.narrow(0, first * kTokens, count * kTokens));
}

// The reference: plain torch in one process, all tokens and both experts.
std::vector<double> train_plainly(Moe& model) {
  torch::optim::AdamW optimizer(model.parameters(), kLearningRate);
  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    loss(model, step, 0, kRanks).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(model.parameters(), kMaxNorm));
    optimizer.step();
    optimizer.zero_grad();
  }
  return norms;
}

double largest_gap(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double gap = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    gap = std::max(gap, (a[i] - b[i]).abs().max().item<double>());
  }
  return gap;
}

int train(const std::string& folder) {
  const zero::Group world = zero::init_process_group({.device = at::kCPU});
  const zero::Mesh mesh(world, {{"edp", kRanks / kExperts}, {"ep", kExperts}});
  const auto expert_ranks = mesh.group({"ep"}).make_communicator("tokens", zero::Purpose::kData);
  Moe model(expert_ranks.get());

  // Group 0: dense, over all ranks. Group 1: this rank's expert, over the ranks that hold the same
  // one. An expert sees tokens of all four ranks, whose losses are means of their own tokens.
  std::vector<torch::optim::OptimizerParamGroup> groups{model.dense_parameters(),
                                                        model.experts[0]->parameters()};
  auto adamw = std::make_unique<torch::optim::AdamW>(std::move(groups),
                                                     torch::optim::AdamWOptions(kLearningRate));
  zero::ZeroOptimizer optimizer(
      model, std::move(adamw), world,
      zero::ZeroOptions().placement(
          1, zero::GroupPlacement().sharded_over(mesh.group({"edp"})).averaged_over(kRanks)));

  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.backward(loss(model, step, world.rank(), 1));
    norms.push_back(optimizer.clip_grad_norm_(kMaxNorm).item<double>());
    optimizer.step();
  }
  if (!folder.empty()) optimizer.save_checkpoint(folder);

  Moe reference(nullptr);
  const std::vector<double> expected = train_plainly(reference);
  double norm_gap = 0.0;
  for (int step = 0; step < kSteps; ++step) {
    norm_gap = std::max(norm_gap, std::abs(norms[step] - expected[step]) / expected[step]);
    if (world.rank() == 0 && step % 25 == 0) {
      std::printf("step %2d  gradient norm %.6f  in one process %.6f\n", step, norms[step],
                  expected[step]);
    }
  }
  const auto& own_expert = reference.experts[static_cast<size_t>(mesh.coordinate("ep"))];
  const double gap =
      std::max(largest_gap(model.dense_parameters(), reference.dense_parameters()),
               largest_gap(model.experts[0]->parameters(), own_expert->parameters()));
  if (world.rank() == 0) {
    std::printf("%d ranks and one process differ by at most %.1e in a norm, %.1e in a parameter\n",
                world.world_size(), norm_gap, gap);
  }
  return norm_gap < 1e-5 && gap < 1e-4 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "";
  if (argc > 2 || folder.starts_with("-")) {
    std::fprintf(stderr, "usage: hybrid_moe [<folder for a checkpoint>]\n");
    return folder == "--help" ? 0 : 2;
  }
  try {
    zero::examples::enter_callers_folder();
    return zero::launch_local(kRanks, [&] { return train(folder); });
  } catch (const c10::Error& error) {
    // Not what(), which adds a C++ backtrace.
    std::fprintf(stderr, "hybrid_moe: %s\n", error.what_without_backtrace());
    return 1;
  }
}
