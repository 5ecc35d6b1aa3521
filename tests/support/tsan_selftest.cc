// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A program with a data race, to show that ThreadSanitizer with our suppressions
// reports one there: ranks that are threads count in a gradient hook, below the
// frames of libtorch, into one integer without a lock.

#include <chrono>
#include <cstdio>
#include <thread>

#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace {

int shared_count = 0;

// Slowly, so that both ranks are in it at once: libtorch's own locks before and after
// it would else order them by chance.
__attribute__((noinline)) void count_without_a_lock() {
  for (int i = 0; i < 20; ++i) {
    ++shared_count;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main() {
  zero::run_ranks(2, [](const zero::Group& group) {
    zero::OddModel model(1);
    model->trunk->weight.register_hook([](const at::Tensor&) { count_without_a_lock(); });
    zero::ZeroOptimizer optimizer(*model, zero::make_inner(zero::Inner::kSgd, *model), group,
                                  zero::ZeroOptions().stage(1));
    for (uint64_t step = 0; step < 5; ++step) {
      optimizer.backward(model->loss(zero::random_tensor({3, 17}, step),
                                     zero::random_tensor({3, 11}, step), zero::OddModelImpl::kAll));
      optimizer.step();
    }
  });
  std::printf("counted %d\n", shared_count);
  return 0;
}
