// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// No rank waits for ever: a rank that is stuck, ends or is killed becomes a
// CommunicationError on the others within the timeout and a second, which names what was
// waited for and who is missing. Afterwards the optimizer refuses further use.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <functional>
#include <latch>
#include <string>
#include <thread>

#include "tests/support/cases_at_once.h"
#include "tests/support/error_of.h"
#include "tests/support/run_program.h"
#include "tests/support/run_ranks.h"
#include "tests/support/training.h"
#include "zero/checkpoint_options.h"
#include "zero/errors.h"
#include "zero/zero_optimizer.h"

namespace zero {
namespace {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{2000};
// The promise is the timeout and a second, half of which error_within() adds.
constexpr milliseconds kLimit = kTimeout + milliseconds(500);
constexpr milliseconds kPrompt{500};

// The text of an error that another rank has caused, or this one.
std::string typed_error_within(milliseconds limit, const std::function<void()>& call,
                               bool of_another = true) {
  bool is_others = false;
  const std::string text = error_within(limit, [&] {
    try {
      call();
    } catch (const CommunicationError&) {
      is_others = true;
      throw;
    }
  });
  EXPECT_EQ(is_others, of_another) << text;
  return text;
}

struct Rank {
  explicit Rank(const Group& group, const ZeroOptions& options = ZeroOptions().bucket_bytes(600))
      : group(group) {
    optimizer = std::make_unique<ZeroOptimizer>(*model, make_inner(Inner::kSgdMomentum, *model),
                                                group, options);
  }
  at::Tensor loss() {
    return model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll);
  }
  void backward() { optimizer->backward(loss()); }
  void train() {
    backward();
    optimizer->clip_grad_norm_(1.0);
    optimizer->step();
  }

  // Nothing works any more, everything says why, at once.
  void refuses_everything(const Words& reason) {
    ZeroOptimizer& o = *optimizer;
    const at::Tensor p = model->scale;
    const std::vector<std::function<void()>> calls = {
        [&] { backward(); },
        [&] { loss().backward(); },
        [&] { o.step(); },
        [&] { o.zero_grad(); },
        [&] { o.clip_grad_norm_(1.0); },
        [&] { o.clip_grad_value_(1.0); },
        [&] { o.reduce_gradients(); },
        [&] { o.gradient(p); },
        [&] { o.master(p); },
        [&] { o.refresh_master_parameters(); },
        [&] { o.refresh_working_parameters(); },
        [&] { o.broadcast_buffers(); },
        [&] { o.check_replicas(); },
        [&] { auto guard = o.no_sync(); },
        [&] { o.grad_norm(); },
        [&] { o.freeze({p}); },
        [&] { o.unfreeze({p}); },
        [&] { o.add_param_group(torch::optim::OptimizerParamGroup({p})); },
        [&] { o.save_checkpoint(::testing::TempDir() + "/refused"); },
        [&] { o.save_checkpoint_async(::testing::TempDir() + "/refused"); },
        [&] { o.load_checkpoint(::testing::TempDir() + "/refused"); },
        [&] { o.load_plain_state(*make_inner(Inner::kSgdMomentum, *model)); },
    };
    for (size_t i = 0; i < calls.size(); ++i) {
      SCOPED_TRACE("call " + std::to_string(i));
      const std::string text = typed_error_within(milliseconds(200), calls[i]);
      expect_words(text, {"rank " + std::to_string(group.rank()) + ": ",
                          "expected a working optimizer, got one that failed earlier",
                          "resume from a checkpoint"});
      expect_words(text, reason);
    }
  }

  const Group group;
  OddModel model{1};
  std::unique_ptr<ZeroOptimizer> optimizer;
};

RunOptions with_timeout(Transport transport = Transport::kGloo) {
  RunOptions options;
  options.transport = transport;
  options.timeout = kTimeout;
  return options;
}

// ---------------------------------------------------------------------
// A rank that is stuck

void expect_timeout_without_rank_2(const std::function<void(Rank&)>& instead,
                                   const std::function<void(Rank&)>& call, const Words& words) {
  std::latch done(2);
  run_ranks(
      3,
      [&](const Group& group) {
        Rank rank(group);
        rank.train();
        if (group.rank() == 2) {
          instead(rank);
          done.wait();
          return;
        }
        rank.backward();
        const std::string text = typed_error_within(kLimit, [&] { call(rank); });
        expect_words(text, words);
        // The other survivor may have hung up first; then this rank says who was
        // late as well as who was lost.
        expect_words(text, {"rank " + std::to_string(group.rank()) + ": ", "rank 2 did not send"});
        rank.refuses_everything(words);
        done.count_down();
      },
      with_timeout());
}

TEST(StuckTest, RankThatNeverCallsStep) {
  expect_timeout_without_rank_2([](Rank& r) { r.backward(); }, [](Rank& r) { r.optimizer->step(); },
                                {"control message of step()"});
}

TEST(StuckTest, RankThatNeverCallsBackward) {
  expect_timeout_without_rank_2([](Rank&) {}, [](Rank& r) { r.optimizer->clip_grad_norm_(1.0); },
                                {"control message of clip_grad_norm_()"});
}

// p -= grad / 10, after `before`.
class Interrupted : public torch::optim::Optimizer {
 public:
  Interrupted(std::vector<at::Tensor> parameters, std::function<void()> before)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(0.1)),
        before_(std::move(before)) {}
  at::Tensor step(LossClosure) override {
    before_();
    at::NoGradGuard no_grad;
    for (at::Tensor& p : param_groups()[0].params()) {
      if (p.grad().defined()) p.sub_(p.grad(), 0.1);
    }
    return {};
  }

 private:
  std::function<void()> before_;
};

void interrupt_update(const std::function<void()>& before,
                      const std::function<void(const Group&, ZeroOptimizer&, OddModel&)>& check) {
  run_ranks(
      2,
      [&](const Group& group) {
        OddModel model(1);
        const auto nothing = [] {};
        ZeroOptimizer optimizer(
            *model,
            std::make_unique<Interrupted>(
                model->parameters(), group.rank() == 1 ? before : std::function<void()>(nothing)),
            group, ZeroOptions().elementwise(true));
        optimizer.backward(
            model->loss(random_tensor({3, 17}, 1), random_tensor({3, 11}, 2), OddModelImpl::kAll));
        check(group, optimizer, model);
      },
      with_timeout());
}

// After the agreement, among the data.
TEST(StuckTest, RankThatNeverFinishesItsUpdate) {
  std::latch done(1);
  interrupt_update([&] { done.wait(); },
                   [&](const Group& group, ZeroOptimizer& optimizer, OddModel&) {
                     if (group.rank() == 0) {
                       expect_words(error_within(kLimit, [&] { optimizer.step(); }),
                                    {"rank 0: ", "gather_rows of parameter bucket 0", "rank 1",
                                     "within 2000 ms"});
                       done.count_down();
                     } else {
                       expect_words(error_within(kLimit + kTimeout, [&] { optimizer.step(); }),
                                    {"rank 1: ", "parameter bucket 0", "rank 0"});
                     }
                   });
}

TEST(StuckTest, RankWhoseUpdateThrows) {
  interrupt_update([] { TORCH_CHECK(false, "no more sugar"); },
                   [](const Group& group, ZeroOptimizer& optimizer, OddModel&) {
                     const auto step = [&] { optimizer.step(); };
                     const bool of_another = group.rank() == 0;
                     const std::string text = typed_error_within(kPrompt, step, of_another);
                     expect_words(text, {"no more sugar"});
                     if (of_another) {
                       expect_words(
                           text, {"parameter bucket 0", "lost rank 1",
                                  "rank 1 had reported: the update of this rank's shard failed"});
                     }
                     expect_words(typed_error_within(kPrompt, step, of_another),
                                  {"expected a working optimizer", "no more sugar"});
                   });
}

// ---------------------------------------------------------------------
// A rank that ends

TEST(EndedTest, OptimizerDestroyedWithGradientsOnTheirWay) {
  run_ranks(
      3,
      [](const Group& group) {
        Rank rank(group);
        rank.train();
        rank.backward();
        if (group.rank() == 2) {
          error_within(kPrompt, [&] { rank.optimizer.reset(); });
          return;
        }
        const std::string text = error_within(kPrompt, [&] { rank.optimizer->step(); });
        expect_words(text,
                     {"lost rank", "rank 2",
                      "rank 2 had reported: its optimizer was destroyed with gradients on their "
                      "way"});
        rank.refuses_everything({"rank 2"});
      },
      with_timeout());
}

TEST(EndedTest, OptimizerDestroyedBetweenSteps) {
  run_ranks(
      2,
      [](const Group& group) {
        Rank rank(group);
        rank.train();
        if (group.rank() == 1) return;
        rank.backward();
        expect_words(error_within(kPrompt, [&] { rank.optimizer->step(); }), {"lost rank 1"});
      },
      with_timeout());
}

TEST(EndedTest, EverybodyDestroysWithGradientsOnTheirWay) {
  run_ranks(3,
            [](const Group& group) {
              for (int64_t stage : {1, 2}) {
                Rank rank(group, ZeroOptions().stage(stage).bucket_bytes(100));
                for (int pass = 0; pass < 3; ++pass) rank.backward();
                error_within(kPrompt, [&] { rank.optimizer.reset(); });
              }
              Rank rank(group);  // nothing of it is left in the group
              rank.train();
              EXPECT_EQ(rank.optimizer->stats().steps, 1);
            },
            {.transport = kRealTransport});
}

// An exception in the training loop of one rank.
TEST(EndedTest, ThreadThatThrows) {
  run_ranks(
      2,
      [](const Group& group) {
        try {
          Rank rank(group);
          rank.train();
          rank.backward();
          if (group.rank() == 1) throw std::runtime_error("out of data");
          expect_words(error_within(kPrompt, [&] { rank.optimizer->step(); }), {"lost rank 1"});
        } catch (const std::runtime_error&) {
        }
      },
      with_timeout());
}

// Writing to a peer that has ended raises SIGPIPE, which would end this process
// without a word.
TEST(EndedTest, BrokenPipesAreSurvived) {
  run_ranks(2, [](const Group& group) { Rank(group).train(); }, {.transport = kRealTransport});
  std::raise(SIGPIPE);
}

// The network dies under a rank at every point of a few steps in turn: more of them where rows need
// no messages.
void die_at_every_message(bool shared_memory) {
  const int steps = shared_memory ? 8 : 2;
  int refused = 0;
  for (int call = 1; call < 40; ++call) {
    SCOPED_TRACE("message " + std::to_string(call));
    RunOptions options = with_timeout(Transport::kMemory);
    options.shared_memory = shared_memory;
    options.network = std::make_shared<MemoryNetwork>();
    std::array<std::string, 3> texts;
    run_ranks(
        3,
        [&](const Group& group) {
          std::unique_ptr<Rank> rank;
          std::string& text = texts[group.rank()];
          // Each by itself, since together they may take that long on a busy machine.
          text = error_within(kLimit, [&] {
            rank = std::make_unique<Rank>(group, ZeroOptions().bucket_bytes(3000));
            if (group.rank() == 1) options.network->kill_at(1, MemoryOp::kSend, call);
          });
          for (int step = 0; step < steps && text.empty(); ++step) {
            text = error_within(kLimit, [&] { rank->train(); });
          }
          if (!text.empty()) rank->refuses_everything({});
        },
        options);
    // The death of one is an error of all whom it still owed something.
    for (int r : {0, 2}) {
      if (texts[r].empty()) continue;
      ++refused;
      expect_words(texts[r], {"rank " + std::to_string(r), "rank 1"});
    }
  }
  EXPECT_GT(refused, 40);
}

TEST(EndedTest, DeathAtEveryMessage) { die_at_every_message(false); }

// The same where rows need no messages.
TEST(EndedTest, DeathAtEveryMessageBesideSharedMemory) { die_at_every_message(true); }

TEST(EndedTest, LostMessageIsATimeout) {
  RunOptions options = with_timeout(Transport::kMemory);
  options.network = std::make_shared<MemoryNetwork>();
  run_ranks(
      2,
      [&](const Group& group) {
        Rank rank(group);
        rank.train();
        rank.backward();
        // The control message: the gradients are on their way already.
        if (group.rank() == 1) options.network->drop_next(1, MemoryOp::kSend);
        const std::string text = error_within(kLimit, [&] { rank.optimizer->step(); });
        if (group.rank() == 0) expect_words(text, {"rank 1 did not send within 2000 ms"});
        EXPECT_NE(text, "");
      },
      options);
}

// ---------------------------------------------------------------------
// Processes

void expect_death_noticed(const std::string& arguments) {
  const std::string program = path_in("FAILURE_PROGRAM", "tests/training/failure_program");
  const auto start = Clock::now();
  const auto [exit_status, output] = run_program("exec " + program + " " + arguments);
  EXPECT_EQ(exit_status, 128 + SIGKILL) << output;
  // Far below the group's timeout of 2 minutes.
  EXPECT_LT(Clock::now() - start, std::chrono::minutes(1)) << output;
  for (int survivor : {0, 2}) {
    expect_words(output, {"survivor " + std::to_string(survivor) + " at step 3: rank " +
                          std::to_string(survivor) + ": "});
  }
  // In whichever message it is noticed: of a reduction, or the control message.
  expect_words(output, {"lost rank 1"});
}

TEST(ProcessTest, KilledInTheMiddleOfTraining) { expect_death_noticed("23 600"); }

// The others are reading its memory, or it is reading theirs.
TEST(ProcessTest, KilledWhileRowsAreShared) { expect_death_noticed("30000 600000"); }

}  // namespace
}  // namespace zero

int main(int argc, char** argv) { return zero::run_cases_at_once(argc, argv, 4); }
