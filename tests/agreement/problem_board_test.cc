// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/problem_board.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/frozen_store.h"

namespace zero {
namespace {

using std::chrono::milliseconds;

TEST(ProblemBoardTest, AFrozenStoreCostsHalfASecond) {
  const auto frozen = c10::make_intrusive<FrozenStore>();
  ProblemBoard board(frozen, 0, 3, milliseconds(5000));
  frozen->freeze(true);
  EXPECT_EQ(error_within(milliseconds(500),
                         [&] {
                           board.announce("no more sugar");
                           expect_words(board.announced_after_failure(),
                                        {"what other ranks reported is not known"});
                         }),
            "");
  frozen->freeze(false);
}

TEST(ProblemBoardTest, NamesWhoReportedAndWhoDidNot) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProblemBoard first(store, 0, 3, milliseconds(5000));
  ProblemBoard second(store, 1, 3, milliseconds(5000));
  second.announce("rank 1: no more sugar");
  const std::string text = first.announced_after_failure();
  EXPECT_EQ(text, "\nrank 1 had reported: no more sugar\nrank 2 has reported nothing");
  EXPECT_EQ(first.announced(), "\nrank 1 had reported: no more sugar");
  second.announce("");
  EXPECT_EQ(first.announced(), "");
}

TEST(ProblemBoardTest, TextsOfATopic) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProblemBoard first(store, 0, 2, milliseconds(300));
  ProblemBoard second(store, 1, 2, milliseconds(300));
  first.leave("topic", "one");
  EXPECT_EQ(second.text_of("topic", 0), "one");
  expect_words(first.text_of("topic", 1), {"its text is not here", "topic/1"});
}

TEST(ProblemBoardTest, AskedForNoMoreThan64TextsHoweverManyRanksThereAre) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProblemBoard last(store, 99, 100, milliseconds(5000));
  for (int rank = 0; rank < 64; ++rank) {
    ProblemBoard board(store, rank, 100, milliseconds(5000));
    board.announce("sugar " + std::to_string(rank));
  }
  last.announce("no more sugar");
  const std::string all = last.announced_after_failure();
  expect_words(all, {"\nrank 0 had reported: sugar 0\n", "\nrank 63 had reported: sugar 63"});
  EXPECT_EQ(all.find("has reported nothing"), std::string::npos) << all;
}

TEST(ProblemBoardTest, OfTheRanksBehindTheFirst64TheOneThatAnnouncesFirstIsRead) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProblemBoard first(store, 0, 100, milliseconds(5000));
  ProblemBoard one(store, 65, 100, milliseconds(5000)), two(store, 99, 100, milliseconds(5000));
  for (int i = 0; i < 2; ++i) {
    one.announce("rank 65: no more sugar");
    two.announce("rank 65 has closed its connections");
    EXPECT_EQ(first.announced(), "\nrank 65 had reported: no more sugar");
    const std::string all = first.announced_after_failure();
    expect_words(all, {"\nrank 1 has reported nothing", "\nrank 65 had reported: no more sugar"});
    EXPECT_EQ(all.find("rank 64"), std::string::npos) << all;
    EXPECT_EQ(one.announced(), "");
    // The next time it is another.
    one.announce("");
    two.announce("");
    EXPECT_EQ(first.announced(), "");
    two.announce("no more salt");
    EXPECT_EQ(first.announced(), "\nrank 99 had reported: no more salt");
    two.announce("");
  }
}

TEST(ProblemBoardTest, OfItsOwnAnnouncementsARankReadsNone) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProblemBoard board(store, 1, 2, milliseconds(5000));
  board.announce("no more sugar");
  EXPECT_EQ(board.announced(), "");
  ProblemBoard other(store, 0, 2, milliseconds(5000));
  EXPECT_EQ(other.announced(), "\nrank 1 had reported: no more sugar");
  // What is announced later takes its place.
  board.announce("no more salt");
  EXPECT_EQ(other.announced(), "\nrank 1 had reported: no more salt");
}

}  // namespace
}  // namespace zero
