// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// recover() with every kind of optimizer, layout and dtype: all ranks go back to a protected step
// and make the same steps again, in every bit.
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <latch>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/checkpoint_run.h"
#include "tests/support/error_of.h"
#include "tests/support/fixed_gradients.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/checkpoint/format/manifest.h"
#include "zero/checkpoint_options.h"

namespace zero {
namespace {

// Collective. Of a communicator that is not the optimizer's, which all ranks have connected.
void fail_a_connection(const ZeroOptimizer& optimizer, std::latch& connected) {
  const auto own = optimizer.group().make_communicator("own", Purpose::kControl);
  connected.arrive_and_wait();
  own->abort("as in a test");
}

// A group of several ranks has the same number of them again, as if a connection had failed.
void expect_the_same_again(const std::string& name, Training training, int ranks_per_machine = 0) {
  training.options.bucket_bytes(training.options.bucket_bytes().value_or(900)).protect(2);
  RunOptions run_options;
  run_options.ranks_per_machine = ranks_per_machine;
  if (ranks_per_machine > 0) run_options.transport = kRealTransport;
  const int ranks = ranks_per_machine > 0 ? 4 : 3;
  std::latch connected(ranks);
  run_ranks(
      ranks,
      [&](const Group& group) {
        CheckpointRun run(training, group, 1);
        run.train(0, 5);
        const Snapshot before = run.snapshot();
        fail_a_connection(*run.optimizer, connected);
        const RecoveryReport report = run.optimizer->recover();
        const auto step = static_cast<int>(report.steps);
        ASSERT_TRUE(step == 2 || step == 4) << step;
        {
          at::NoGradGuard no_grad;
          run.model->counter.add_(1);  // what run.train() does after step()
        }
        run.train(step, 5);
        EXPECT_EQ(differing(before, run.snapshot()), 0) << name;
      },
      run_options);
}

// The values of steps that are made again are in the window once.
TEST(RecoverOptionsTest, TheWindowOfASkipRule) {
  std::latch connected(3);
  run_ranks(3, [&](const Group& group) {
    const auto rule = std::make_shared<OutlierRule>(/*sigmas=*/6, /*window=*/4);
    Training training;
    training.options.bucket_bytes(900).protect(2).skip_if(rule);
    CheckpointRun run(training, group, 1);
    run.train(0, 9);
    const std::string before = rule->state();
    fail_a_connection(*run.optimizer, connected);
    const RecoveryReport report = run.optimizer->recover();
    EXPECT_NE(rule->state(), before);
    run.train(static_cast<int>(report.steps), 9);
    EXPECT_EQ(rule->state(), before);
  });
}

// As those of a GAN, which a failure between their steps leaves at different ones.
TEST(RecoverOptionsTest, EachOfTwoOptimizersGoesBackToAStepOfItsOwn) {
  std::latch first(3), second(3);
  run_ranks(3, [&](const Group& group) {
    Training training;
    training.options.bucket_bytes(900).protect(2);
    CheckpointRun ahead(training, group, 1), behind(training, group, 2);
    ahead.train(0, 5);
    behind.train(0, 3);
    for (std::latch* connected : {&first, &second}) {
      const Snapshot of_ahead = ahead.snapshot(), of_behind = behind.snapshot();
      // A failure may leave the pass of the other, for which all or some were switched off.
      const std::vector<at::Tensor> parameters = behind.model->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (connected == &first || i % 2 == 0) parameters[i].requires_grad_(false);
      }
      fail_a_connection(*ahead.optimizer, *connected);
      const auto go_back = [](CheckpointRun& run, int last) {
        const auto step = static_cast<int>(run.optimizer->recover().steps);
        EXPECT_LT(step, last);
        at::NoGradGuard no_grad;
        if (step > 0) run.model->counter.add_(1);  // what run.train() does after step()
        return step;
      };
      const int first_of_ahead = go_back(ahead, 5), first_of_behind = go_back(behind, 3);
      ahead.train(first_of_ahead, 5);
      behind.train(first_of_behind, 3);
      EXPECT_EQ(differing(of_ahead, ahead.snapshot()), 0);
      EXPECT_EQ(differing(of_behind, behind.snapshot()), 0);
    }
  });
}

// Rank 0 may still be receiving what the first one's step has made since.
TEST(RecoverOptionsTest, TheSecondOfTwoOptimizersOverOneModuleLeavesTheFirstAsItIs) {
  std::latch connected(3);
  run_ranks(3, [&](const Group& group) {
    // What is sent with others, in channels_last too, and what is sent alone.
    const std::vector<at::Tensor> initial = {
        random_tensor({4, 3, 2, 2}, 1).contiguous(at::MemoryFormat::ChannelsLast),
        random_tensor({3}, 2), random_tensor({70000}, 3), random_tensor({5}, 4)};
    GivenGradients model(initial);
    const auto optimizer_of = [&](size_t begin, size_t end) {
      const std::vector<at::Tensor> own(model.values.begin() + begin, model.values.begin() + end);
      return std::make_unique<torch::optim::SGD>(own, 0.1);
    };
    const ZeroOptions options = ZeroOptions().protect(1);
    ZeroOptimizer first(model, optimizer_of(0, 3), group, options);
    ZeroOptimizer second(model, optimizer_of(3, 4), group, options);
    const auto step = [&] {
      first.backward(model.loss(initial));
      first.step();
      second.step();
    };
    step();
    fail_a_connection(first, connected);
    first.recover();
    std::vector<at::Tensor> left;
    for (const at::Tensor& value : model.values) left.push_back(value.detach().clone());
    const auto add_on_rank_0 = [&](float number) {
      for (size_t i = 0; i < 3 && group.rank() == 0; ++i) {
        model.values[i].mutable_data_ptr<float>()[0] += number;
      }
    };
    add_on_rank_0(8);
    second.recover();
    add_on_rank_0(-8);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_LT((model.values[i] - left[i]).abs().max().item<float>(), 1e-5) << i;
    }
    step();
  });
}

TEST(RecoverOptionsTest, TheRunIsTheSameOneWhenRank0IsGone) {
  const std::string parent = fresh_folder("run");
  run_ranks(3,
            [&](const Group& group) {
              Training training;
              training.options.bucket_bytes(900).protect(2);
              CheckpointRun run(training, group, 1);
              run.train(0, 3);
              run.optimizer->save_checkpoint(parent + "/before");
              if (group.rank() == 0) return;
              expect_words(error_of([&] { run.train(3, 9); }), {"rank 0"});
              EXPECT_EQ(run.optimizer->recover().members, (std::vector<int>{1, 2}));
              run.optimizer->save_checkpoint(parent + "/after");
            },
            {.transport = Transport::kGloo});
  EXPECT_EQ(read_manifest(parent + "/after").run, read_manifest(parent + "/before").run);
}

// What a load has read is protected when it returns, long before the next protected step.
TEST(RecoverOptionsTest, ALoadedCheckpointIsWhatRecoverGoesBackTo) {
  const std::string folder = fresh_folder("protected_load") + "/save";
  std::latch connected(2);
  run_ranks(2, [&](const Group& group) {
    Training training;
    training.options.bucket_bytes(900).protect(100);
    CheckpointRun saved(training, group, 1), run(training, group, 2);
    saved.train(0, 3);
    saved.optimizer->save_checkpoint(folder);
    run.optimizer->load_checkpoint(folder);
    run.train(3, 5);
    fail_a_connection(*run.optimizer, connected);
    EXPECT_EQ(run.optimizer->recover().steps, 3);
    const Snapshot expected = saved.snapshot();  // both are collective
    EXPECT_EQ(differing(expected, run.snapshot()), 0);
  });
}

TEST(RecoverOptionsTest, TheAverageOfTheParameters) {
  std::latch connected(3);
  run_ranks(3, [&](const Group& group) {
    Training training;
    training.options.bucket_bytes(900).protect(2).ema(EmaOptions().decay(0.7));
    CheckpointRun run(training, group, 1);
    const auto averages = [&] {
      const auto guard = run.optimizer->use_ema();
      std::vector<at::Tensor> result;
      for (const at::Tensor& p : run.model->parameters()) result.push_back(p.detach().clone());
      return result;
    };
    run.train(0, 5);
    const auto before = averages();
    // The guard of an optimizer that recovered does nothing more.
    auto guard = run.optimizer->use_ema();
    fail_a_connection(*run.optimizer, connected);
    const RecoveryReport report = run.optimizer->recover();
    run.train(static_cast<int>(report.steps), 5);
    guard.end();
    const auto after = averages();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << i;
  });
}

TEST(RecoverOptionsTest, MomentsInEightBitsAndSplitMasters) {
  Training training;
  training.width = 300;  // the first matrix has more than 4096 elements
  training.dtype = at::kBFloat16;
  training.options.bucket_bytes(9000).moments(Moments::kInt8).split_masters(true);
  expect_the_same_again("split masters", training);
}

TEST(RecoverOptionsTest, MomentsInFewerBytes) {
  for (const Inner inner : {Inner::kAdam, Inner::kSgdMomentum, Inner::kLion, Inner::kMuon}) {
    for (const Moments moments : {Moments::kBFloat16, Moments::kInt8}) {
      Training training;
      training.inner = inner;
      training.width = 300;  // the first matrix has more than 4096 elements
      training.options.bucket_bytes(9000).moments(moments);
      if (inner == Inner::kLion) training.options.layout(Layout::kPerParameter);
      if (inner == Inner::kAdam) training.options.layout(Layout::kWholeParameters);
      expect_the_same_again("optimizer " + std::to_string(static_cast<int>(inner)), training);
    }
  }
}

TEST(RecoverOptionsTest, AfterAGuardOfTheAverageThatCouldNotEnd) {
  run_ranks(2, [&](const Group& group) {
    Training training;
    training.options.bucket_bytes(900).protect(2).ema(EmaOptions().decay(0.7));
    CheckpointRun run(training, group, 1);
    run.train(0, 5);
    const Snapshot before = run.snapshot();
    {
      const auto guard = run.optimizer->use_ema();
      if (group.rank() == 0) error_of([&] { run.optimizer->step(); });
    }
    EXPECT_NE(error_of([&] { run.optimizer->grad_norm(); }), "");
    const RecoveryReport report = run.optimizer->recover();
    {
      at::NoGradGuard no_grad;
      run.model->counter.add_(1);  // what run.train() does after step()
    }
    run.train(static_cast<int>(report.steps), 5);
    EXPECT_EQ(differing(before, run.snapshot()), 0);
  });
}

// Layouts and dtypes take turns.
TEST(RecoverOptionsTest, EveryOptimizerLayoutAndDtype) {
  constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kPerParameter,
                                 Layout::kWholeParameters};
  constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};
  int turn = 0;
  for (const Inner inner :
       {Inner::kSgdMomentum, Inner::kAdam, Inner::kRmsprop, Inner::kAdagrad, Inner::kLion,
        Inner::kAdamW, Inner::kOwn, Inner::kMuon, Inner::kLamb, Inner::kAdafactor}) {
    Training training;
    training.inner = inner;
    training.dtype = kDtypes[(turn + turn / 3) % 3];
    training.max_norm = 0.7;
    training.options.elementwise(inner == Inner::kOwn).stage(1 + turn % 2);
    if (turn < 7) training.options.layout(kLayouts[turn % 3]);
    expect_the_same_again("optimizer " + std::to_string(static_cast<int>(inner)), training);
    ++turn;
  }
}

TEST(RecoverOptionsTest, OverlapAndMachines) {
  Training overlap;
  overlap.options.overlap_gather(true);
  expect_the_same_again("overlap", overlap);
  expect_the_same_again("two machines", {}, /*ranks_per_machine=*/2);
}

TEST(RecoverOptionsTest, AnAsynchronousSaveOfBeforeIsLost) {
  const std::string folder = fresh_folder("lost_save") + "/save";
  std::latch connected(2);
  run_ranks(2, [&](const Group& group) {
    Training training;
    training.options.protect(2);
    CheckpointRun run(training, group, 1);
    run.train(0, 3);
    const auto pending = run.optimizer->save_checkpoint_async(folder);
    fail_a_connection(*run.optimizer, connected);
    run.optimizer->recover();
    run.train(2, 3);
    const auto again = run.optimizer->save_checkpoint_async(folder);
    expect_words(error_of([&] { pending->finish(); }),
                 {"save_checkpoint_async(", "recover() or a change of parameters", "save again"});
    again->finish();
    const Snapshot saved = run.snapshot();
    CheckpointRun other(training, group, 5);
    other.optimizer->load_checkpoint(folder);
    EXPECT_EQ(differing(saved, other.snapshot()), 0);
  });
}

}  // namespace
}  // namespace zero
