// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/step_record.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"
#include "tests/support/warnings.h"

namespace zero {
namespace {

TEST(SkipWatchTest, MoreInARowThanAcceptedAreAnErrorThatCountsThem) {
  const Warnings warnings;
  SkipWatch watch(3, 2);
  watch.record(5, 0);
  for (const int64_t skipped : {1, 2, 3}) watch.record(5, skipped);
  expect_words(error_of([&] { watch.record(5, 4); }),
               {"rank 2: 4 steps in a row were skipped", "expected at most 3",
                "ZeroOptions::max_skipped_in_a_row"});
  // The row starts again.
  watch.record(5, 7);
  expect_words(error_of([&] { watch.record(5, 8); }), {"4 steps in a row"});
}

TEST(SkipWatchTest, AStepThatUpdatesEndsTheRow) {
  const Warnings warnings;
  SkipWatch watch(3, 0);
  watch.record(0, 3);
  watch.record(1, 3);
  watch.record(1, 6);
  // Counts that cover both kinds do not say in which order they came.
  watch.record(2, 9);
  watch.record(2, 12);
  EXPECT_NE(error_of([&] { watch.record(2, 13); }), "");
}

TEST(SkipWatchTest, CountsOfAnEarlierCheckpointEndTheRow) {
  const Warnings warnings;
  SkipWatch watch(3, 0);
  watch.record(0, 3);
  watch.record(0, 1);
  watch.record(0, 4);
  EXPECT_NE(error_of([&] { watch.record(0, 5); }), "");
}

TEST(SkipWatchTest, ZeroAcceptsAnyNumber) {
  const Warnings warnings;
  SkipWatch watch(0, 0);
  watch.record(0, 1000000);
  watch.record(0, 2000000);
}

TEST(SkipWatchTest, TheFirstSkippedStepIsAWarningOnRankZero) {
  for (const int rank : {0, 1}) {
    const Warnings warnings;
    SkipWatch watch(0, rank);
    watch.record(1, 0);
    EXPECT_TRUE(warnings.texts.empty());
    watch.record(1, 1);
    watch.record(1, 2);
    ASSERT_EQ(warnings.texts.size(), rank == 0 ? 1u : 0u);
    if (rank == 0) expect_words(warnings.texts[0], {"step() was skipped", "NaN or infinite"});
  }
}

}  // namespace
}  // namespace zero
