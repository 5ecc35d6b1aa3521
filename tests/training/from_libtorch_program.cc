// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The code of docs/from_libtorch.md as a program, which readme_test runs and compares with the
// page. It trains on two ranks and writes model.pt.
#include <ATen/ops/nll_loss.h>
#include <torch/data.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <memory>
#include <optional>
#include <utility>

#include "tests/support/random_tensors.h"
#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() : linear(register_module("linear", torch::nn::Linear(13, 5))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(x).log_softmax(1); }

  torch::nn::Linear linear;
};
TORCH_MODULE(Net);

struct Examples : torch::data::datasets::Dataset<Examples> {
  torch::data::Example<> get(size_t index) override {
    return {zero::random_tensor({13}, index),
            at::scalar_tensor(static_cast<int64_t>(index % 5), at::kLong)};
  }
  std::optional<size_t> size() const override { return 130; }
};

auto data() { return Examples().map(torch::data::transforms::Stack<>()); }

int train() {
  zero::Group group = zero::init_process_group();
  torch::manual_seed(1 + group.rank());
  Net model;
  model->to(group.device());
  auto adam = std::make_unique<torch::optim::Adam>(model->parameters(), 1e-3);
  zero::ZeroOptimizer optimizer(*model, std::move(adam), group);
  const size_t examples = data().size().value();
  const int64_t batch = 64 / group.world_size();

  for (int epoch = 0; epoch < 10; ++epoch) {
    torch::data::samplers::DistributedRandomSampler sampler(examples, group.world_size(),
                                                            group.rank());
    sampler.set_epoch(epoch);
    auto loader = torch::data::make_data_loader(data(), sampler, batch);
    for (auto& example : *loader) {
      at::Tensor x = example.data.to(group.device()), y = example.target.to(group.device());
      at::Tensor loss = torch::nll_loss(model->forward(x), y);
      optimizer.backward(loss);
      optimizer.clip_grad_norm_(1.0);
      optimizer.step();
    }
  }
  if (group.rank() == 0) torch::save(model, "model.pt");
  return 0;
}

[[maybe_unused]] void step_on_a_part(const zero::Group& group, zero::ZeroOptimizer& optimizer,
                                     Net& model, const torch::data::Example<>& batch) {
  at::Tensor x = batch.data.tensor_split(group.world_size())[group.rank()].to(group.device());
  at::Tensor y = batch.target.tensor_split(group.world_size())[group.rank()].to(group.device());
  double share = static_cast<double>(x.size(0)) / batch.data.size(0);
  if (share > 0) {
    at::Tensor loss = torch::nll_loss(model->forward(x), y);
    optimizer.backward(loss * share * group.world_size());
  }
  optimizer.step();
}

}  // namespace

int main() { return zero::launch_local(2, train); }
