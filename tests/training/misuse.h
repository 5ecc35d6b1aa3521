// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Promise 8 of zero/zero_optimizer.h: misuse is an error on the rank where it
// is seen and on every rank at its next collective call, says expected, got,
// remedy and rank, and sends nothing. And nothing is lost: training goes on
// afterwards with the bits it would have had.
//
// Shared by the tests of misuse at construction, of parameters and in training.
#pragma once

#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/zero_optimizer.h"

namespace zero {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

// Far below the groups' timeout: no rank may learn of misuse by waiting for it.
inline constexpr std::chrono::seconds kSoon{5};

// What `action` throws, and soon; without a backtrace, empty if nothing.
std::string error_soon(const std::function<void()>& action);

// One rank's model and optimizer, and the training that all tests do.
struct Rank {
  explicit Rank(const Group& group, const ZeroOptions& options = {}) : group(group) {
    auto sgd = make_inner(Inner::kSgdMomentum, *model);
    inner = sgd.get();
    optimizer = std::make_unique<ZeroOptimizer>(*model, std::move(sgd), group, options);
  }

  bool is(int rank) const { return group.rank() == rank; }
  at::Tensor loss(int step) {
    const auto seed = static_cast<uint64_t>(100 * step + group.rank());
    return model->loss(random_tensor({3, 17}, seed), random_tensor({3, 11}, seed + 50),
                       OddModelImpl::kAll);
  }
  void backward(int step) { optimizer->backward(loss(step)); }
  void clip_and_step() {
    optimizer->clip_grad_norm_(0.1);
    optimizer->step();
  }
  void train(int step) {
    backward(step);
    clip_and_step();
  }

  // `call` throws on every rank and sends no data. All ranks read `words`; those
  // that did nothing wrong also read whose fault it is.
  void refuses(int culprit, const std::function<void()>& call, const Words& words) {
    const std::string text = error_without_data(call);
    expect_words(text, words);
    expect_words(text, {"rank " + std::to_string(group.rank()) + ": "});
    if (!is(culprit)) {
      expect_words(text, {"given up by all ranks because of rank " + std::to_string(culprit)});
    }
  }
  void refuses_step(int culprit, const Words& words) {
    refuses(
        culprit, [this] { optimizer->step(); }, words);
  }
  // The ranks' calls differ: everybody reads what everybody called.
  void differs(const std::function<void()>& call, const Words& words) {
    const std::string text = error_without_data(call);
    expect_words(text, words);
    expect_words(text, {"rank " + std::to_string(group.rank()) + ": expected the same call",
                        "\n  rank 0: ", "\n  rank 1: ", "in the same order"});
  }
  // What backward passes sent may still be on its way, but nothing is added to it.
  std::string error_without_data(const std::function<void()>& call) {
    const Stats before = optimizer->stats();
    const std::string text = error_soon(call);
    const Stats after = optimizer->stats();
    EXPECT_EQ(before.rounds, after.rounds) << text;
    EXPECT_EQ(before.data.gather_calls, after.data.gather_calls) << text;
    EXPECT_EQ(before.data.small_calls, after.data.small_calls) << text;
    return text;
  }

  const Group group;
  OddModel model{1};
  torch::optim::Optimizer* inner;
  std::unique_ptr<ZeroOptimizer> optimizer;
};

inline ZeroOptions stage(int64_t number) { return ZeroOptions().stage(number).bucket_bytes(600); }

// Trains step 0, calls `body`, which trains step 1 and does something wrong
// beside it, and trains step 2. The parameters must then have the bits that
// training without misuse gives.
void expect_survives(const ZeroOptions& options, const std::function<void(Rank&)>& body,
                     int world_size = 2);

class AtStage : public ::testing::TestWithParam<int64_t> {};

}  // namespace zero
