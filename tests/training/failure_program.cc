// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The program that failure_test starts: three processes train, and one of them
// is killed in the middle of a backward pass. The others say what they see.
//
//   failure_program <width of the model> <bucket bytes>
#include <c10/util/Exception.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "tests/support/forked_ranks.h"
#include "tests/support/training.h"
#include "zero/launch.h"
#include "zero/zero_optimizer.h"

namespace {

int train(int64_t width, int64_t bucket_bytes) {
  // The launcher tells the others to end at once; they shall speak first.
  std::signal(SIGTERM, SIG_IGN);
  zero::InitOptions init;
  init.timeout = std::chrono::minutes(2);
  const zero::Group group = zero::init_process_group(init);
  zero::OddModel model(1, width);
  zero::ZeroOptimizer optimizer(*model, zero::make_inner(zero::Inner::kAdamW, *model), group,
                                zero::ZeroOptions().bucket_bytes(bucket_bytes));
  int step = 0;
  if (group.rank() == 1) {
    model->trunk->bias.register_hook([&](const at::Tensor&) {
      if (step == 3) std::raise(SIGKILL);
    });
  }
  try {
    for (; step < 1000; ++step) {
      const auto seed = static_cast<uint64_t>(step);
      optimizer.backward(model->loss(zero::random_tensor({3, 17}, seed),
                                     zero::random_tensor({3, 11}, seed), zero::OddModelImpl::kAll));
      optimizer.step();
    }
  } catch (const c10::Error& error) {
    std::printf("survivor %d at step %d: %s\n", group.rank(), step, error.what_without_backtrace());
    return 1;
  }
  return 0;
}

int program(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s width bucket_bytes\n", argv[0]);
    return 2;
  }
  return zero::launch_local(3, [&] { return train(std::atoll(argv[1]), std::atoll(argv[2])); });
}

}  // namespace

int main(int argc, char** argv) { zero::run_with_forked_ranks(program, argc, argv); }
