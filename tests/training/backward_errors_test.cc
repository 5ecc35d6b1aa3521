// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Backward passes that fail, and gradients that are not taken.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/training/backward_rank.h"
#include "zero/training/backward.h"

namespace zero {
namespace {

TEST(BackwardPassesErrorsTest, AGradientOfALossThatWasNotScaledIsRefused) {
  on_ranks(
      1,
      [](Rank& r) {
        expect_words(r.passes->unscaled_problem(), {"a loss that was not scaled", "1024"});
        expect_words(error_of([&] { r.loss(0).backward(); }),
                     {"rank 0: gradient of value", "a loss that was not scaled"});
        r.expect_nothing();
        expect_words(r.protocol.take_problem(Call::kStep), {"a loss that was not scaled"});
        r.passes->scale_loss(r.loss(0));
        EXPECT_EQ(r.passes->unscaled_problem(), "");
        r.passes->forget();
        EXPECT_NE(r.passes->unscaled_problem(), "");
        r.passes->run(r.loss(0));
        EXPECT_EQ(r.passes->unscaled_problem(), "");
      },
      1024);
  on_ranks(1, [](Rank& r) { EXPECT_EQ(r.passes->unscaled_problem(), ""); });
}

TEST(BackwardPassesErrorsTest, AGradientBetweenClippingAndTheStepIsRefused) {
  on_ranks(1, [](Rank& r) {
    r.clipping.clip(1, 2, r.clipping.norm(2, 0), 0);
    const std::string problem = "backward() between a clip and step()";
    expect_words(r.error_of_run(r.loss(0)), {"rank 0: " + problem});
    expect_words(r.protocol.take_problem(Call::kStep), {problem});
    expect_words(error_of([&] { r.loss(0).backward(); }), {"gradient of value", problem});
    expect_words(r.protocol.take_problem(Call::kStep), {"gradient of value", problem});
    // Nothing was taken, so that nothing is incomplete.
    EXPECT_FALSE(r.protocol.is_backward_broken());
    r.expect_nothing();
    r.clipping.reset();
    r.passes->run(r.loss(1));
    r.expect_mean({1});
  });
}

TEST(BackwardPassesErrorsTest, AnExceptionOnOneRankLeavesThePassBrokenOnAllUntilZeroGrad) {
  on_ranks(2, [](Rank& r) {
    bool throws = r.rank() == 1;
    r.value(1).register_hook([&](const at::Tensor&) { TORCH_CHECK(!throws, "no more sugar"); });
    const std::string error = r.error_of_run(r.loss(0));
    EXPECT_EQ(error.empty(), r.rank() == 0) << error;
    if (r.rank() == 1) expect_words(error, {"no more sugar"});
    EXPECT_EQ(r.protocol.is_backward_broken(), throws);
    const std::vector<std::string> words{"rank 1: ", "a backward pass ended with an exception",
                                         "call zero_grad() on all ranks", "It was: no more sugar"};
    expect_words(r.call(Call::kStep), words);
    expect_words(r.call(Call::kStep), words);
    r.zero_grad();
    throws = false;
    r.passes->run(r.loss(1));
    r.expect_mean({1});
  });
}

TEST(BackwardPassesErrorsTest, AGradientThatCannotBeSentLeavesThePassBrokenWithItsOwnError) {
  on_ranks(2, [](Rank& r) {
    const at::Tensor rows = at::zeros({1}, at::kLong);
    const bool sparse = r.rank() == 0;
    const std::string error =
        r.error_of_run(at::embedding(r.value(3), rows, -1, false, sparse).sum());
    const std::vector<std::string> words{"rank 0: ", "gradient of value3: expected a dense tensor",
                                         "Gradients are incomplete: call zero_grad()"};
    EXPECT_EQ(error.empty(), !sparse) << error;
    if (sparse) expect_words(error, words);
    EXPECT_EQ(r.protocol.is_backward_broken(), sparse);
    const std::string later = r.call(Call::kStep);
    expect_words(later, words);
    EXPECT_EQ(later.find("a backward pass ended"), std::string::npos) << later;
    r.zero_grad();
    r.passes->run(r.loss(1));
    r.expect_mean({1});
  });
}

TEST(BackwardPassesErrorsTest, ALossThatIsNoScalarIsAnError) {
  on_ranks(1, [](Rank& r) {
    const auto error_of_outputs = [&](const at::Tensor& output) {
      return error_of([&] { r.passes->run({r.loss(0), output}, {}, false); });
    };
    expect_words(r.error_of_run(r.value(1) * 2), {"rank 0: loss: expected a 0-dim", "[7]"});
    expect_words(r.error_of_run({}), {"rank 0: loss: expected a 0-dim tensor, got undefined"});
    expect_words(error_of_outputs(r.value(1) * 2),
                 {"rank 0: backward(): output 1: expected an output gradient for shape [7]"});
    expect_words(error_of_outputs({}), {"output 1: expected a tensor, got an undefined one"});
    expect_words(error_of_outputs(at::ones({})), {"output 1: expected one that requires"});
    // No pass has begun, so that nothing is incomplete.
    EXPECT_FALSE(r.protocol.is_backward_broken());
    expect_words(r.protocol.take_problem(Call::kStep), {"output 1: expected one that requires"});
    r.expect_nothing();
    r.passes->run(r.loss(0));
    r.expect_mean({0});
  });
}

TEST(BackwardPassesErrorsTest, AStepOfTheInnerOptimizerIsThrownByTheNextPass) {
  on_ranks(1, [](Rank& r) {
    for (const bool plain : {false, true}) {
      r.shards.inner().step();
      const std::string error =
          error_of([&] { plain ? r.loss(0).backward() : r.passes->run(r.loss(0)); });
      expect_words(error, {std::string("rank 0: ") + kInnerStepProblem});
      EXPECT_EQ(r.protocol.take_problem(Call::kStep), kInnerStepProblem);
      EXPECT_FALSE(r.protocol.is_backward_broken());
      r.zero_grad();
    }
    r.passes->run(r.loss(1));
    r.expect_mean({1});
  });
}

TEST(BackwardPassesErrorsTest, AFailedOptimizerTakesNoGradient) {
  on_ranks(1, [](Rank& r) {
    EXPECT_NE(error_of([&] {
                r.protocol.fail_stop([&] {
                  r.comms->abort("the disk of rank 0 is on fire");
                  TORCH_CHECK(false, "on fire");
                });
              }),
              "");
    expect_words(error_of([&] { r.loss(0).backward(); }), {"expected a working optimizer"});
    expect_words(r.error_of_run(r.loss(0)), {"expected a working optimizer"});
    EXPECT_FALSE(r.reducer.any_used());
  });
}

TEST(BackwardPassesErrorsTest, AScaledPassScalesNoOther) {
  on_ranks(
      2,
      [](Rank& r) {
        r.passes->run(r.loss(0));
        const std::string problem = "gradients of a loss that was not scaled";
        expect_words(error_of([&] { r.loss(1).backward(); }), {problem});
        expect_words(r.protocol.take_problem(Call::kStep), {problem});
        // Until the step.
        r.passes->scale_loss(r.loss(1)).backward();
        r.passes->scale_loss(r.loss(2)).backward();
        EXPECT_EQ(r.protocol.take_problem(Call::kStep), "");
        r.passes->forget();
        expect_words(error_of([&] { r.loss(1).backward(); }), {problem});
        expect_words(r.protocol.take_problem(Call::kStep), {problem});
        r.zero_grad();
      },
      4);
}

TEST(BackwardPassesErrorsTest, AGradientThatWasReplacedBreaksThePass) {
  on_ranks(1, [](Rank& r) {
    r.passes->run(r.loss(0));
    r.value(1).mutable_grad() = at::ones({7});
    expect_words(r.error_of_run(r.loss(1)), {"rank 0: parameter value1", "expected p.grad() as"});
    EXPECT_TRUE(r.protocol.is_backward_broken());
    r.zero_grad();
    r.passes->run(r.loss(2));
    r.expect_mean({2});
  });
}

TEST(BackwardPassesErrorsTest, AResetOfSomeGradientsIsMisuseBeforeThePass) {
  on_ranks(1, [](Rank& r) {
    r.passes->run(r.loss(0));
    r.value(1).mutable_grad().reset();
    expect_words(r.error_of_run(r.loss_of(3, 1)), {"rank 0: parameter value1", "kept or dropped"});
    EXPECT_FALSE(r.protocol.is_backward_broken());
    expect_words(r.protocol.take_problem(Call::kStep), {"kept or dropped"});
    // A pass of another optimizer's loss has no beginning that we see, and uses it.
    expect_words(error_of([&] { r.loss(1).backward(); }), {"kept or dropped"});
    EXPECT_TRUE(r.protocol.is_backward_broken());
    r.zero_grad();
    r.passes->run(r.loss(2));
    r.expect_mean({2});
  });
}

}  // namespace
}  // namespace zero
