// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/skip_watch.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"
#include "tests/support/warnings.h"

namespace zero {
namespace {

TEST(SkipWatchTest, MoreInARowThanAcceptedAreAnErrorThatCountsThem) {
  const Warnings warnings;
  SkipWatch watch(3, 2);
  watch.see(5, 0);
  for (const int64_t skipped : {1, 2, 3}) watch.see(5, skipped);
  expect_words(error_of([&] { watch.see(5, 4); }),
               {"rank 2: 4 steps in a row were skipped", "expected at most 3",
                "ZeroOptions::max_skipped_in_a_row"});
  // The row starts again.
  watch.see(5, 7);
  expect_words(error_of([&] { watch.see(5, 8); }), {"4 steps in a row"});
}

TEST(SkipWatchTest, AStepThatUpdatesEndsTheRow) {
  const Warnings warnings;
  SkipWatch watch(3, 0);
  watch.see(0, 3);
  watch.see(1, 3);
  watch.see(1, 6);
  // Counts that cover both kinds do not say in which order they came.
  watch.see(2, 9);
  watch.see(2, 12);
  EXPECT_NE(error_of([&] { watch.see(2, 13); }), "");
}

TEST(SkipWatchTest, CountsOfAnEarlierCheckpointEndTheRow) {
  const Warnings warnings;
  SkipWatch watch(3, 0);
  watch.see(0, 3);
  watch.see(0, 1);
  watch.see(0, 4);
  EXPECT_NE(error_of([&] { watch.see(0, 5); }), "");
}

TEST(SkipWatchTest, ZeroAcceptsAnyNumber) {
  const Warnings warnings;
  SkipWatch watch(0, 0);
  watch.see(0, 1000000);
  watch.see(0, 2000000);
}

TEST(SkipWatchTest, TheFirstSkippedStepIsAWarningOnRankZero) {
  for (const int rank : {0, 1}) {
    const Warnings warnings;
    SkipWatch watch(0, rank);
    watch.see(1, 0);
    EXPECT_TRUE(warnings.texts.empty());
    watch.see(1, 1);
    watch.see(1, 2);
    ASSERT_EQ(warnings.texts.size(), rank == 0 ? 1u : 0u);
    if (rank == 0) expect_words(warnings.texts[0], {"step() was skipped", "NaN or infinite"});
  }
}

}  // namespace
}  // namespace zero
