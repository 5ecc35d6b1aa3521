// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/call_protocol.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

struct Rank {
  Rank(const Group& group, const ZeroOptions& options, int64_t groups)
      : domains(make_domains(group, options, groups)),
        comms(group),
        protocol(domains, of, comms, at::kCPU) {
    for (int64_t g = 0; g < groups; ++g) of.push_back(domains.of_group[g]);
    comms.connect(domains);
  }
  // A call as ZeroOptimizer makes it.
  std::string call(Call call, const AgreedArguments& arguments = {}) {
    Agreement own;
    own.used.assign(of.size(), 0);
    return error_of(
        [&] { protocol.agree_on_call(call, protocol.take_problem(call), arguments, own); });
  }

  const ShardDomains domains;
  std::vector<int64_t> of;  // per parameter, of which each group has one
  OptimizerCommunicators comms;
  CallProtocol protocol;
};

void on_ranks(int world_size, const std::function<void(Rank&)>& body) {
  run_ranks(world_size,
            [&](const Group& group) {
              Rank rank(group, ZeroOptions(), 1);
              body(rank);
            },
            {.timeout = std::chrono::seconds(60)});
}

TEST(CallProtocolTest, MisuseOfOneRankIsThrownThereAndByAllInTheNextCall) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [](Rank& r) {
      const bool bad = r.protocol.rank() == 0;
      if (bad) {
        EXPECT_EQ(error_of([&] { r.protocol.throw_misuse("no more sugar"); }),
                  "rank 0: no more sugar");
      }
      EXPECT_EQ(r.protocol.next_zero_grad_is_collective(), bad);
      expect_words(r.call(Call::kStep), {"no more sugar"});
      // What was refused on all ranks makes the next zero_grad() collective.
      EXPECT_TRUE(r.protocol.next_zero_grad_is_collective());
      EXPECT_EQ(r.call(Call::kZeroGrad), "");
      EXPECT_FALSE(r.protocol.next_zero_grad_is_collective());
    });
  }
}

TEST(CallProtocolTest, ABrokenBackwardIsThrownByEveryCallUntilItIsRepaired) {
  on_ranks(2, [](Rank& r) {
    if (r.protocol.rank() == 1) r.protocol.break_backward("a hook threw");
    for (const Call call : {Call::kStep, Call::kClipGradNorm, Call::kStep}) {
      expect_words(r.call(call), {"a hook threw"});
    }
    EXPECT_EQ(r.protocol.is_backward_broken(), r.protocol.rank() == 1);
    EXPECT_EQ(r.call(Call::kZeroGrad), "");
    r.protocol.forget_broken_backward();
    EXPECT_EQ(r.call(Call::kStep), "");
    EXPECT_FALSE(r.protocol.next_zero_grad_is_collective());
  });
}

TEST(CallProtocolTest, NoCollectiveCallInsideNoSync) {
  on_ranks(2, [](Rank& r) {
    *r.protocol.no_sync() = r.protocol.rank() == 0;
    expect_words(r.call(Call::kStep), {"step() inside no_sync: expected no guard to be alive"});
    *r.protocol.no_sync() = false;
    EXPECT_EQ(r.call(Call::kStep), "");
  });
}

TEST(CallProtocolTest, AFailureOfACommunicatorIsFinalAndOtherErrorsAreNot) {
  on_ranks(2, [](Rank& r) {
    EXPECT_THROW(r.protocol.run_call([] { throw std::invalid_argument("no more sugar"); }),
                 std::invalid_argument);
    EXPECT_FALSE(r.protocol.has_failed());
    r.protocol.check_usable();
    r.protocol.run_call([&] { EXPECT_EQ(r.call(Call::kStep), ""); });
    if (r.protocol.rank() == 0) r.comms.abort("the disk of rank 0 is on fire");
    const auto step = [&] { r.protocol.agree_on_call(Call::kStep, "", {}, Agreement()); };
    expect_words(error_of([&] { r.protocol.run_call(step); }), {"is on fire"});
    EXPECT_TRUE(r.protocol.has_failed());
    expect_words(error_of([&] { r.protocol.check_usable(); }),
                 {"expected a working optimizer", "The first failure was: ", "is on fire"});
    bool ran = false;
    EXPECT_NE(error_of([&] { r.protocol.run_call([&] { ran = true; }); }), "");
    EXPECT_FALSE(ran);
  });
}

TEST(CallProtocolTest, PromisedRoundsAreSentWithoutAMessage) {
  on_ranks(2, [](Rank& r) {
    r.protocol.expect_rounds(3);
    const int64_t before = r.comms.control_traffic().small_calls;
    Agreement own;
    own.rounds = 1;
    own.used = {1};
    for (const Call call :
         {Call::kReduceGradients, Call::kClipGradNorm, Call::kClipGradValue, Call::kStep}) {
      const Agreement got = r.protocol.agree_on_call(call, "", {}, own);
      EXPECT_EQ(got.rounds, 3);
      EXPECT_TRUE(got.passes);
      EXPECT_EQ(got.used, own.used);
    }
    // A problem is thrown where it is.
    if (r.protocol.rank() == 1) {
      EXPECT_EQ(error_of([&] { r.protocol.agree_on_call(Call::kStep, "no more sugar", {}, own); }),
                "rank 1: no more sugar");
      EXPECT_TRUE(r.protocol.next_zero_grad_is_collective());
    }
    EXPECT_EQ(r.comms.control_traffic().small_calls, before);
    r.protocol.agree_on_call(Call::kMaster, "", {}, own);
    EXPECT_EQ(r.comms.control_traffic().small_calls, before + 1);
  });
}

TEST(CallProtocolTest, ArgumentsAreComparedOnTheRanksThatTheyConcern) {
  run_ranks(4, [](const Group& group) {
    const int half = group.rank() / 2;
    const Group pair = group.subgroup({2 * half, 2 * half + 1}, "half");
    Rank r(group, ZeroOptions().placement(1, GroupPlacement().sharded_over(pair)), 2);
    const std::string text = "half " + std::to_string(half);
    EXPECT_EQ(r.call(Call::kMaster, {"", {"", text}}), "");
    expect_words(r.call(Call::kMaster, {text, {}}),
                 {"rank 0: master() with half 0", "rank 3: master() with half 1"});
    const std::string own = text + (group.rank() == 3 ? " differs" : "");
    expect_words(r.call(Call::kMaster, {"", {"", own}}), {"rank 3: master() with half 1 differs"});
    EXPECT_EQ(r.protocol.at_home("x").by_domain, (std::vector<std::string>{"x", ""}));
  });
}

TEST(CallProtocolTest, OnlyCallsOfAStepAreAlikeInAStaticGraph) {
  for (int i = static_cast<int>(Call::kReduceGradients); i <= static_cast<int>(Call::kEndEma);
       ++i) {
    const auto call = static_cast<Call>(i);
    EXPECT_EQ(is_of_a_step(call), call <= Call::kStep || call == Call::kClipGradValue)
        << call_name(call);
  }
}

}  // namespace
}  // namespace zero
