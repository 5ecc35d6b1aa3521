// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/control_channel.h"

#include <ATen/ops/bitwise_or.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/communicator.h"
#include "zero/errors.h"

namespace zero {
namespace {

struct Link {
  explicit Link(const Group& group)
      : communicator(group.make_communicator("control", Purpose::kControl)),
        channel(*communicator, group) {}
  const std::unique_ptr<Communicator> communicator;
  ControlChannel channel;
};

Agreement rounds(int64_t count) {
  Agreement own;
  own.rounds = count;
  return own;
}

Agreement used(std::vector<uint8_t> flags) {
  Agreement own;
  own.used = std::move(flags);
  return own;
}

CallArguments arguments(const std::string& on_all_ranks, const std::string& by_domain = "",
                        bool domains_differ = false) {
  return {on_all_ranks, by_domain, domains_differ};
}

void on_ranks(int world_size, const std::function<void(const Group&, Link&)>& body) {
  run_ranks(world_size, [&](const Group& group) {
    Link link(group);
    body(group, link);
  });
}

// That a call which all ranks make is still possible.
void expect_agrees(Link& link) {
  EXPECT_EQ(link.channel.agree(Call::kStep, {}, "", rounds(3)).rounds, 3);
}

TEST(ControlChannelTest, CallsHaveTheirOwnNames) {
  EXPECT_STREQ(call_name(Call::kReduceGradients), "reduce_gradients()");
  EXPECT_STREQ(call_name(Call::kLatestCheckpoint), "latest_checkpoint()");
  EXPECT_STREQ(call_name(Call::kResizeRows), "resize_rows()");
  EXPECT_STREQ(call_name(Call::kEndEma), "the end of use_ema()");
}

TEST(ControlChannelTest, PutsTogetherWhatTheRanksHave) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [&](const Group& group, Link& link) {
      Agreement own;
      own.rounds = 5 - group.rank();
      own.passes = group.rank() == world_size - 1;
      own.used.assign(40, 0);
      own.used[group.rank()] = 1;
      own.used[39] = 1;
      std::vector<uint8_t> any(40, 0);
      for (int r = 0; r < world_size; ++r) any[r] = 1;
      any[39] = 1;
      const Agreement all = link.channel.agree(Call::kStep, arguments("lr 0.1"), "", own);
      EXPECT_EQ(all.rounds, 5);
      EXPECT_TRUE(all.passes);
      EXPECT_EQ(all.used, any);
      EXPECT_FALSE(link.channel.agree(Call::kStep, {}, "", {}).passes);
    });
  }
}

TEST(ControlChannelTest, SendsASecondMessageOnlyWhereUsedParametersDiffer) {
  on_ranks(3, [](const Group& group, Link& link) {
    const int64_t before = link.communicator->traffic().small_calls;
    link.channel.agree(Call::kStep, {}, "", used({1, 0, 1}));
    EXPECT_EQ(link.communicator->traffic().small_calls - before, 1);
    link.channel.agree(Call::kStep, {}, "", used({1, group.rank() == 2, 1}));
    EXPECT_EQ(link.communicator->traffic().small_calls - before, 3);
  });
}

TEST(ControlChannelTest, AProblemOfOneRankIsAnErrorOnAllThatNamesIt) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [&](const Group& group, Link& link) {
      const int bad = world_size / 2;
      const bool own = group.rank() == bad;
      const std::string text = error_of(
          [&] { link.channel.agree(Call::kZeroGrad, {}, own ? "no more sugar" : "", {}); });
      const std::string rank = "rank " + std::to_string(group.rank()) + ": ";
      const std::string rest = own ? "no more sugar"
                                   : "zero_grad() was given up by all ranks because of rank " +
                                         std::to_string(bad) + ": no more sugar";
      EXPECT_EQ(text, rank + rest);
      expect_agrees(link);
    });
  }
}

// The text of a CommunicationError; what else is thrown fails the test.
std::string communication_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError& error) {
    return error.what_without_backtrace();
  }
  return {};
}

bool is_communication_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommunicationError&) {
    return true;
  } catch (const c10::Error&) {
  }
  return false;
}

TEST(ControlChannelTest, AnErrorHasOneTypeOnAllRanks) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [&](const Group& group, Link& link) {
      for (int bad = 0; bad < world_size; ++bad) {
        const bool here = group.rank() == bad;
        const auto call = [&](const Problem& problem) {
          link.channel.agree(Call::kStep, {}, problem, {});
        };
        expect_words(communication_error_of(
                         [&] { call(here ? Problem("somebody joins", true) : Problem()); }),
                     {"rank " + std::to_string(group.rank()) + ": ", "somebody joins"});
        // An own problem comes first, on whichever rank.
        const auto both = [&] {
          call(here ? Problem("no sugar") : Problem("somebody joins", true));
        };
        EXPECT_FALSE(is_communication_error(both));
        expect_words(error_of(both), {"rank " + std::to_string(group.rank()) + ": ", "no sugar"});
      }
      expect_agrees(link);
    });
  }
}

TEST(AllOrNoneTest, AnErrorHasOneTypeOnAllRanks) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [&](const Group& group, Link& link) {
      for (int bad = 0; bad < world_size; ++bad) {
        const bool here = group.rank() == bad;
        const auto run = [&](const std::function<void()>& body) {
          run_on_all_ranks(*link.communicator, "a save", [&]() -> std::string {
            body();
            return {};
          });
        };
        const auto lose = [] { throw_communication_error("lost"); };
        expect_words(communication_error_of([&] {
                       run([&] {
                         if (here) lose();
                       });
                     }),
                     {"a save", "lost"});
        const auto both = [&] {
          run([&] {
            TORCH_CHECK(!here, "no sugar");
            lose();
          });
        };
        EXPECT_FALSE(is_communication_error(both));
        expect_words(error_of(both), {"a save", "no sugar"});
        run([] {});
      }
    });
  }
}

TEST(ControlChannelTest, DifferentCallsAreNamedOnEveryRank) {
  for (const int world_size : {2, 3, 4}) {
    on_ranks(world_size, [](const Group& group, Link& link) {
      const bool other = group.rank() == 1;
      const std::string text = error_of(
          [&] { link.channel.agree(other ? Call::kMaster : Call::kGradient, {}, "", {}); });
      expect_words(text, {"expected the same call with the same arguments on every rank",
                          "\n  rank 0: gradient()\n  rank 1: master()", "can be made again"});
      EXPECT_EQ(text.find("zero_grad"), std::string::npos);
      expect_agrees(link);
    });
  }
}

TEST(ControlChannelTest, DifferentArgumentsAreNamedOnEveryRank) {
  on_ranks(3, [](const Group& group, Link& link) {
    const bool other = group.rank() == 2;
    const auto step = [&](const CallArguments& given) {
      return error_of([&] { link.channel.agree(Call::kStep, given, "", {}); });
    };
    expect_words(
        step(arguments(other ? "lr 0.2" : "lr 0.1", "parameter 7")),
        {"rank 1: step() with lr 0.1, parameter 7", "rank 2: step() with lr 0.2, parameter 7"});
    // Those that only some ranks share are compared elsewhere.
    const std::string expert = other ? "expert 2" : "expert 1";
    EXPECT_EQ(step(arguments("", expert)), "");
    expect_words(step(arguments("", expert, other)),
                 {"rank 1: step() with expert 1", "rank 2: step() with expert 2"});
    expect_agrees(link);
  });
}

TEST(ControlChannelTest, ZeroGradAgainstAnotherCallSaysWhenItIsCollective) {
  on_ranks(2, [](const Group& group, Link& link) {
    const Call call = group.rank() == 0 ? Call::kStep : Call::kZeroGrad;
    expect_words(error_of([&] { link.channel.agree(call, {}, "", {}); }),
                 {"rank 1: zero_grad()", "local on one that has none"});
  });
}

// More ranks than an error lists.
TEST(ControlChannelTest, ACallThatDiffersIsNamedAmongManyRanks) {
  for (const int other : {0, 65}) {
    on_ranks(66, [&](const Group& group, Link& link) {
      const Call call = group.rank() == other ? Call::kZeroGrad : Call::kStep;
      const std::string text = error_of([&] { link.channel.agree(call, {}, "", {}); });
      expect_words(text,
                   {"\n  rank 1: step()", "\n  rank " + std::to_string(other) + ": zero_grad()\n",
                    "local on one that has none"});
      expect_agrees(link);
    });
  }
}

TEST(ControlChannelTest, AFailureIsReportedWithWhatOthersAnnouncedBefore) {
  on_ranks(3, [](const Group& group, Link& link) {
    if (group.rank() == 1) link.channel.announce("rank 1: no more sugar");
    if (group.rank() == 2) link.channel.announce("forgotten by the next call");
    // Only a call that all ranks complete forgets what was announced.
    if (group.rank() == 2) link.channel.announce("");
    link.communicator->all_gather_text("", "rank 1 has announced");
    const std::string text = link.channel.report_failure("the connection broke");
    if (group.rank() != 1) expect_words(text, {"\nrank 1 had reported: no more sugar"});
    // Of its own two reasons a rank announces the first.
    if (group.rank() == 0) {
      EXPECT_EQ(text.find("rank 1 had reported: the connection"), std::string::npos);
      expect_words(text, {"rank 2 had reported: the connection broke"});
    }
    link.communicator->all_gather_text("", "all have read");
    expect_agrees(link);
    link.communicator->all_gather_text("", "all have agreed");
    const std::string later = link.channel.report_failure("once more");
    EXPECT_EQ(later.find("sugar"), std::string::npos) << later;
    link.communicator->all_gather_text("", "all have read again");
  });
}

TEST(ControlChannelTest, FlagsComeBackAndTheirUnionIsABitwiseOr) {
  for (const size_t count : {0, 1, 31, 32, 33, 64, 100}) {
    std::vector<uint8_t> third(count), fifth(count), both(count);
    for (size_t i = 0; i < count; ++i) {
      third[i] = i % 3 == 0;
      fifth[i] = i % 5 == 1 || i % 32 == 31;
      both[i] = third[i] | fifth[i];
    }
    const at::Tensor bits = pack_flags(third);
    EXPECT_EQ(bits.numel(), static_cast<int64_t>((count + 31) / 32));
    std::vector<uint8_t> back(count, 7);
    unpack_flags(bits, back);
    EXPECT_EQ(back, third);
    unpack_flags(at::bitwise_or(bits, pack_flags(fifth)), back);
    EXPECT_EQ(back, both);
  }
}

}  // namespace
}  // namespace zero
