// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A TorchScript module trains by the list of its parameters as plain torch trains it, and goes on
// from a checkpoint.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

// As torch::jit::load() returns one: it has a part, and a buffer that forward() writes.
torch::jit::Module scripted() {
  torch::jit::Module part("part");
  part.register_parameter("weight", random_tensor({5, 3}, 1).requires_grad_(), /*is_buffer=*/false);
  part.define("def forward(self, x):\n    return torch.matmul(x, self.weight)\n");
  torch::jit::Module module("net");
  module.register_module("part", part);
  module.register_parameter("bias", random_tensor({3}, 2).requires_grad_(), /*is_buffer=*/false);
  module.register_buffer("passes", at::full({}, 0.0));
  module.define(
      "def forward(self, x):\n"
      "    self.passes.add_(1)\n"
      "    return torch.tanh(self.part.forward(x) + self.bias)\n");
  return module;
}

at::Tensor loss(torch::jit::Module& module, int step, int rank) {
  const auto seed = static_cast<uint64_t>(100 * step + rank);
  return module.forward({random_tensor({4, 5}, seed)}).toTensor().square().sum();
}

// The lines that docs/from_libtorch.md shows.
NamedTensors parameters_of(const torch::jit::Module& module) {
  NamedTensors parameters;
  for (const auto& p : module.named_parameters()) parameters.insert(p.name, p.value);
  return parameters;
}
NamedTensors buffers_of(const torch::jit::Module& module) {
  NamedTensors buffers;
  for (const auto& b : module.named_buffers()) buffers.insert(b.name, b.value);
  return buffers;
}

std::unique_ptr<torch::optim::Optimizer> make(bool adam, const std::vector<at::Tensor>& tensors) {
  if (adam) return std::make_unique<torch::optim::AdamW>(tensors, torch::optim::AdamWOptions(0.01));
  return std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(0.05).momentum(0.9));
}

class ScriptedModuleAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(W, ScriptedModuleAt, ::testing::Values(1, 2, 3));

TEST_P(ScriptedModuleAt, TrainsAsPlainTorchAndGoesOnFromACheckpoint) {
  const std::string folder = ::testing::TempDir() + "scripted_module";
  for (const bool adam : {false, true}) {
    std::filesystem::remove_all(folder);
    run_ranks(GetParam(), [&](const Group& group) {
      torch::jit::Module plain = scripted(), module = scripted();
      std::vector<at::Tensor> plain_parameters;
      for (const at::Tensor& p : plain.parameters()) plain_parameters.push_back(p);
      const auto reference = make(adam, plain_parameters);
      const NamedTensors parameters = parameters_of(module);
      EXPECT_EQ(parameters.keys(), (std::vector<std::string>{"part.weight", "bias"}));
      auto optimizer = std::make_unique<ZeroOptimizer>(parameters, make(adam, parameters.values()),
                                                       group, ZeroOptions(), buffers_of(module));
      for (int step = 0; step < 5; ++step) {
        if (step == 3) {
          optimizer->save_checkpoint(folder);
          module = scripted();
          const NamedTensors fresh = parameters_of(module);
          optimizer = std::make_unique<ZeroOptimizer>(fresh, make(adam, fresh.values()), group,
                                                      ZeroOptions(), buffers_of(module));
          optimizer->load_checkpoint(folder);
          EXPECT_EQ(module.attr("passes").toTensor().item<double>(), 3.0);
        }
        reference->zero_grad();
        at::Tensor sum;
        for (int rank = 0; rank < group.world_size(); ++rank) {
          const at::Tensor one = loss(plain, step, rank);
          sum = sum.defined() ? sum + one : one;
        }
        (sum / group.world_size()).backward();
        reference->step();
        optimizer->backward(loss(module, step, group.rank()));
        optimizer->step();
        size_t i = 0;
        for (const at::Tensor& p : module.parameters()) {
          EXPECT_TRUE(p.allclose(plain_parameters[i++], 1e-5, 1e-6)) << "step " << step;
        }
      }
    });
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace zero
