// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/same_on_all_ranks.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

using Lines = std::vector<std::string>;

void on_ranks(int world_size, const std::function<void(Communicator&)>& body) {
  run_ranks(world_size, [&](const Group& group) {
    body(*group.make_communicator("control", Purpose::kControl));
  });
}

std::string check(Communicator& group, const std::string& problem, const Lines& lines) {
  return error_of([&] { check_same_on_all_ranks(group, problem, lines); });
}

TEST(SameOnAllRanksTest, EqualRanksSendThreeNumbersAndGoOn) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [&](Communicator& group) {
      EXPECT_EQ(check(group, "", Lines(1000, "a line of a large model")), "");
      EXPECT_EQ(group.traffic().small_calls, world_size == 1 ? 0 : 1);
      EXPECT_LE(group.traffic().small_bytes_sent, 3 * 8 * world_size);
    });
  }
}

TEST(SameOnAllRanksTest, EveryRankReadsTheProblemsOfAll) {
  for (const int world_size : {1, 2, 3, 4}) {
    on_ranks(world_size, [&](Communicator& group) {
      const int last = world_size - 1;
      const bool bad = group.rank() == 0 || group.rank() == last;
      const std::string rank = "rank " + std::to_string(group.rank()) + ": ";
      const std::string text =
          check(group, bad ? "no more sugar " + std::to_string(group.rank()) : "", {});
      if (bad) {
        EXPECT_EQ(text, rank + "no more sugar " + std::to_string(group.rank()));
      } else {
        EXPECT_EQ(text, rank + "the optimizer was not made on any rank because of:" +
                            "\n  rank 0: no more sugar 0\n  rank " + std::to_string(last) +
                            ": no more sugar " + std::to_string(last));
      }
    });
  }
}

TEST(SameOnAllRanksTest, TheFirstDifferenceIsNamedWithTheRanksThatHaveIt) {
  on_ranks(3, [](Communicator& group) {
    const bool other = group.rank() == 2;
    const std::string text = check(group, "", {"stage 2", other ? "b" : "a", other ? "d" : "c"});
    expect_words(text, {"rank " + std::to_string(group.rank()) + ": expected the same model",
                        "the first difference is\n  rank 0: a\n  rank 2: b\n"});
    EXPECT_EQ(text.find("rank 1: a"), std::string::npos);
  });
}

TEST(SameOnAllRanksTest, OnlyTheLineThatDiffersIsSent) {
  for (const int64_t at : {0, 1, 4999, 9999}) {
    on_ranks(3, [&](Communicator& group) {
      Lines lines(10000, "a line of a large model");
      if (group.rank() == 1) lines[at] = "another line";
      expect_words(check(group, "", lines),
                   {"the first difference is\n  rank 0: a line of a large model\n  rank 1: another "
                    "line\nbuild"});
      EXPECT_LT(group.traffic().small_bytes_sent, 2000);
    });
  }
}

// In quadratic time this would be 10 minutes.
TEST(SameOnAllRanksTest, AHundredThousandLinesAreReadOnce) {
  on_ranks(2, [](Communicator& group) {
    Lines lines(100000, "parameter with a name and a shape");
    lines.push_back("the last one of rank " + std::to_string(group.rank()));
    expect_words(check(group, "", lines),
                 {"rank 0: the last one of rank 0", "rank 1: the last one of rank 1"});
  });
}

TEST(SameOnAllRanksTest, ARankWithFewerLinesHasNothingMore) {
  on_ranks(2, [](Communicator& group) {
    const Lines lines = group.rank() == 0 ? Lines{"a", "b"} : Lines{"a"};
    expect_words(check(group, "", lines), {"rank 0: b\n  rank 1: (nothing more)"});
  });
}

TEST(SameOnAllRanksTest, AProblemComesBeforeADifference) {
  on_ranks(2, [](Communicator& group) {
    const std::string rank = std::to_string(group.rank());
    expect_words(check(group, group.rank() == 1 ? "no more sugar" : "", {rank}), {"no more sugar"});
  });
}

}  // namespace
}  // namespace zero
