// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that endings_test starts: ranks train a model whose rows are larger than the buffers
// of a socket, and leave in the second step, all of them or rank 0 alone.
//
//   endings_program <ending> <world size> [plain]
//
// `plain` sends all data through memory that the ranks share. Without it, data passes through
// sockets, parameters are gathered during the next forward pass, and each step is protected, so
// that there is most to be interrupted. The exit status is 0 where all ranks end without an error.
#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "zero/checkpoint_options.h"
#include "zero/launch.h"
#include "zero/process_group.h"
#include "zero/skip_rule.h"
#include "zero/zero_optimizer.h"

namespace {

constexpr int kLast = 1;
constexpr int kWidth = 2048;

struct Ending {
  std::string name;
  int rank;
  bool of_all(const char* all) const { return name == all; }
  bool of_one(const char* one) const { return name == one && rank == 0; }
};

// Destroyed with the process, behind what main() and all that it calls have made.
std::shared_ptr<torch::nn::Module> model_of_the_process;
std::unique_ptr<zero::ZeroOptimizer> optimizer_of_the_process;

void throw_own() { throw std::runtime_error("the program's own error"); }

void train(const Ending& ending, const zero::Group& group, bool plain) {
  torch::nn::Sequential model;
  for (int i = 0; i < 2; ++i) model->push_back(torch::nn::Linear(kWidth, kWidth));
  auto inner = std::make_unique<torch::optim::SGD>(model->parameters(), 1e-3);
  zero::ZeroOptions options;
  if (!plain) options.overlap_gather(true).protect(1);
  const bool to_end = ending.of_all("all leave it to the process");
  if (to_end) options.skip_if(std::make_shared<zero::OutlierRule>());
  auto made = std::make_unique<zero::ZeroOptimizer>(*model, std::move(inner), group, options);
  zero::ZeroOptimizer& optimizer = *made;
  if (to_end) model_of_the_process = model.ptr();
  if (to_end) optimizer_of_the_process = std::move(made);
  std::unique_ptr<zero::PendingCheckpoint> save;
  for (int step = 0; step <= kLast + 1; ++step) {
    const bool last = step == kLast;
    optimizer.wait_for(*model);
    const at::Tensor loss = model->forward(at::ones({2, kWidth})).sum();
    if (last && ending.of_one("throws before backward")) throw_own();
    if (last && ending.of_one("killed in backward")) {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(15));
        std::raise(SIGKILL);
      }).detach();
    }
    optimizer.backward(loss);
    if (last && ending.of_one("throws after backward")) throw_own();
    if (last && ending.of_all("all return after backward")) return;
    optimizer.step();
    if (last && ending.of_one("throws after step")) throw_own();
    if (last && ending.of_one("returns after step")) return;
    if (last && ending.of_all("all return after step")) return;
    if (last && ending.name.ends_with("in a save")) {
      save = optimizer.save_checkpoint_async(std::getenv("TEST_TMPDIR") + std::string("/save"),
                                             zero::SaveOptions().overwrite(true));
    }
    if (last && ending.of_all("all return in a save")) return;
    if (last && ending.of_one("throws in a save")) throw_own();
  }
}

int run(const std::string& name, bool plain) {
  // The launcher ends the others at once; they shall end by themselves.
  std::signal(SIGTERM, SIG_IGN);
  const zero::Group group = zero::init_process_group(
      {.timeout = std::chrono::minutes(2), .device = at::kCPU, .shared_memory = plain});
  try {
    train({name, group.rank()}, group, plain);
    return 0;
  } catch (const std::exception& error) {
    std::printf("rank %d: %.300s\n", group.rank(), error.what());
    std::fflush(stdout);
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s ending world_size [plain]\n", argv[0]);
    return 2;
  }
  return zero::launch_local(std::atoi(argv[2]), [&] { return run(argv[1], argc > 3); });
}
