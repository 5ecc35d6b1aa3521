// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/communicators.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
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

// Four ranks: parameter group 0 is shared by all of them, and the second by each half.
struct Rank {
  explicit Rank(const Group& group)
      : half(group.rank() / 2),
        domains(make_domains(
            group,
            ZeroOptions().placement(
                1, GroupPlacement().sharded_over(group.subgroup({2 * half, 2 * half + 1}, "half"))),
            2)),
        comms(group) {
    comms.connect(domains);
  }
  const int half;
  const ShardDomains domains;
  OptimizerCommunicators comms;
};

void on_ranks(const std::function<void(Rank&)>& body) {
  run_ranks(4,
            [&](const Group& group) {
              Rank rank(group);
              body(rank);
            },
            {.timeout = std::chrono::seconds(60)});
}

TEST(CommunicatorsTest, WithoutPlacementsThereAreOneOfControlAndOneOfData) {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](const Group& group) {
      OptimizerCommunicators comms(group);
      comms.connect(make_domains(group, ZeroOptions(), 2));
      ASSERT_EQ(comms.domains.size(), 1u);
      EXPECT_EQ(comms.domains[0].data, comms.norm);
      EXPECT_EQ(comms.home.data, comms.norm);
      EXPECT_EQ(comms.domains[0].replicas, nullptr);
      EXPECT_EQ(comms.domains[0].averaged_over, world_size);
      EXPECT_NE(comms.control.get(), comms.norm);
      // Nothing more is agreed where all ranks hold the same.
      const int64_t before = comms.control_traffic().small_calls;
      comms.agree_on_half(make_domains(group, ZeroOptions(), 2), group.rank() == 0);
      EXPECT_EQ(comms.any_half, group.rank() == 0);
      std::vector<uint8_t> used{1, 0};
      EXPECT_TRUE(comms.agree_domains({}, {}, used));
      EXPECT_EQ(comms.control_traffic().small_calls, before);
    });
  }
}

TEST(CommunicatorsTest, EachDomainHasItsRanks) {
  on_ranks([](Rank& r) {
    ASSERT_EQ(r.comms.domains.size(), 2u);
    EXPECT_EQ(r.comms.domains[0].data->world_size(), 4);
    EXPECT_EQ(r.comms.domains[1].data->world_size(), 2);
    EXPECT_EQ(r.comms.norm, r.comms.domains[0].data);
    at::Tensor sum = at::full({1}, r.comms.rank(), at::kDouble);
    r.comms.domains[1].data->all_reduce_sum(sum, "ranks of this half").wait();
    EXPECT_EQ(sum.item<double>(), r.half == 0 ? 0 + 1 : 2 + 3);
    EXPECT_EQ(r.comms.data_traffic().small_calls, 1);
  });
}

TEST(CommunicatorsTest, UsedParametersAreThoseOfTheirDomain) {
  on_ranks([](Rank& r) {
    // Two parameters of all ranks, two of this half.
    const std::vector<int64_t> domain_of{0, 1, 0, 1};
    const int rank = r.comms.rank();
    std::vector<uint8_t> used{rank == 3, rank == 1, 0, rank == 2};
    EXPECT_TRUE(r.comms.agree_domains({"", ""}, domain_of, used));
    EXPECT_EQ(used, (std::vector<uint8_t>{1, r.half == 0, 0, r.half == 1}));
  });
}

TEST(CommunicatorsTest, ArgumentsAreComparedWithinADomain) {
  on_ranks([](Rank& r) {
    const std::vector<int64_t> domain_of{0, 1};
    std::vector<uint8_t> used{1, 1};
    const std::string half = "half " + std::to_string(r.half);
    EXPECT_TRUE(r.comms.agree_domains({"lr 0.1", half}, domain_of, used));
    const std::string own = half + (r.comms.rank() == 3 ? " differs" : "");
    // The other half has compared something else.
    EXPECT_EQ(r.comms.agree_domains({"lr 0.1", own}, domain_of, used), r.half == 0);
    EXPECT_FALSE(r.comms.agree_domains({own, half}, domain_of, used));
  });
}

TEST(CommunicatorsTest, ADifferenceInOneDomainIsAnErrorOnAllRanks) {
  on_ranks([](Rank& r) {
    const auto lines = [&](int64_t domain) {
      const bool differs = domain == 1 && r.comms.rank() == 1;
      return std::vector<std::string>{differs ? "b" : "a"};
    };
    const std::string text = error_of([&] { r.comms.check_domains(r.domains, lines); });
    if (r.half == 0) {
      expect_words(text, {"the first difference is", "rank 0: a", "rank 1: b", "half"});
    } else {
      expect_words(text, {"was not made on any rank because of:", "rank 0: ", "rank 1: b"});
    }
    // Nothing is left over.
    r.comms.check_domains(r.domains, [](int64_t) { return std::vector<std::string>{"a"}; });
  });
}

TEST(CommunicatorsTest, HalfPrecisionOfOneRankIsKnownToAll) {
  on_ranks([](Rank& r) {
    r.comms.agree_on_half(r.domains, false);
    EXPECT_FALSE(r.comms.any_half);
    r.comms.agree_on_half(r.domains, r.comms.rank() == 2);
    EXPECT_TRUE(r.comms.any_half);
  });
}

TEST(CommunicatorsTest, AFailureOfOneClosesAllAndIsExplained) {
  on_ranks([](Rank& r) {
    const auto wait = [&] {
      r.comms.control->all_reduce_max(at::zeros({1}, at::kInt), "x").wait();
    };
    r.comms.with_peer_reports(wait);
    if (r.comms.rank() == 0) {
      r.comms.domains[1].data->abort("the disk of rank 0 is on fire");
      EXPECT_NE(r.comms.control->failed(), "");
    } else {
      expect_words(error_of([&] { r.comms.with_peer_reports(wait); }), {"rank 0", "is on fire"});
    }
    EXPECT_NE(r.comms.failed(), "");
  });
}

TEST(CommunicatorsTest, OneThatIsMadeAfterAFailureIsClosed) {
  run_ranks(2, [](const Group& group) {
    OptimizerCommunicators comms(group);
    comms.abort("the disk is on fire");
    comms.connect(make_domains(group, ZeroOptions(), 2));
    expect_words(comms.norm->failed(), {"is on fire"});
  });
}

TEST(CommunicatorsTest, AnErrorThatIsNoFailureOfTheTransportStaysWhatItIs) {
  on_ranks([](Rank& r) {
    EXPECT_THROW(r.comms.with_peer_reports([] { throw std::invalid_argument("no more sugar"); }),
                 std::invalid_argument);
    EXPECT_EQ(r.comms.failed(), "");
  });
}

}  // namespace
}  // namespace zero
