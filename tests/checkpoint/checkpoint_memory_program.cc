// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What checkpoint_memory_test starts: checkpoint_memory_program <ranks> <inner> <folder>
//
// Ranks as processes, so that each has memory of its own. Fails where a save takes more than this
// rank's shard and 64 MiB, or a load more than its state and 16 MiB (44 of a class of our own,
// whose state is copied): masters are read into the gradient shard. Loads of our own class differ:
// in 150 of them 25 to 39 MiB beside the 30 of the state were seen, with one thread for OpenMP too.
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/own_optimizer.h"
#include "tests/support/peak_memory.h"
#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace {

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < 12; ++i) {
      auto layer = torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false));
      layer->to(at::kBFloat16);
      register_module("layer" + std::to_string(i), layer);
    }
  }
};

int measure(const std::string& inner, const std::string& folder) {
  const zero::Group group = zero::init_process_group({.device = at::kCPU});
  LayersImpl model;
  const bool own = inner == "own";
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (own) {
    optimizer = std::make_unique<zero::OwnOptimizer>(
        std::vector<torch::optim::OptimizerParamGroup>{model.parameters()}, zero::OwnOptions());
  } else {
    optimizer = std::make_unique<torch::optim::AdamW>(model.parameters(), 1e-3);
  }
  zero::ZeroOptimizer sharded(model, std::move(optimizer), group,
                              zero::ZeroOptions().elementwise(own));
  for (const at::Tensor& p : model.parameters()) sharded.backward(p.sum());
  sharded.step();
  // Master and two moments in fp32, or one and a sign in a byte.
  const double elements = 12.0 * 1024 * 1024 / group.world_size();
  const double state = elements * (own ? 5 : 8) / zero::kMiB;
  const double shard = state + elements * 4 / zero::kMiB;
  const double save = zero::peak_growth([&] { sharded.save_checkpoint(folder); });
  const double load = zero::peak_growth([&] { sharded.load_checkpoint(folder); });
  std::printf("%s, rank %d of %d: shard %.0f MiB; peak growth: save %.1f MiB, load %.1f MiB\n",
              inner.c_str(), group.rank(), group.world_size(), shard, save, load);
  // Of torch's classes nothing is copied for a save.
  return save <= (own ? shard + 64 : 64) && load <= state + (own ? 44 : 16) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return zero::launch_local(std::atoi(argv[1]), [&] { return measure(argv[2], argv[3]); });
}
