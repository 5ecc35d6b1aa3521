// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/step_counts.h"

#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace zero {
namespace {

using Counts = std::vector<int64_t>;

at::Tensor nonfinite(double count) { return at::scalar_tensor(count, at::kDouble); }

TEST(SegmentCountsTest, OneMoreWhereUpdatedUnlessTheStepIsSkipped) {
  SegmentCounts counts(3, at::kCPU);
  EXPECT_EQ(counts.read(), (Counts{0, 0, 0}));
  counts.add({1, 0, 1}, {});
  counts.add({1, 0, 1}, nonfinite(0));
  EXPECT_EQ(counts.read(), (Counts{2, 0, 2}));
  for (const double bad : {1.0, 7.0}) counts.add({1, 1, 1}, nonfinite(bad));
  EXPECT_EQ(counts.read(), (Counts{2, 0, 2}));
  counts.add({0, 1, 0}, nonfinite(0));
  EXPECT_EQ(counts.read(), (Counts{2, 1, 2}));
  counts.add(1, 3);
  EXPECT_EQ(counts.read(), (Counts{2, 2, 3}));
}

TEST(SegmentCountsTest, KernelsReadWhatIsReset) {
  SegmentCounts counts(3, at::kCPU);
  const float* second = counts.of(1);
  counts.write({5, 6, 1 << 24});
  EXPECT_EQ(*second, 6);
  counts.reset(1);
  EXPECT_EQ(counts.read(), (Counts{5, 0, 1 << 24}));
  counts.add({1, 1, 0}, {});
  EXPECT_EQ(*second, 1);
  EXPECT_EQ(counts.of(1), second);
}

void expect_counts(const StepCounts::Values& got, int64_t steps, int64_t skipped_steps,
                   bool skipped) {
  EXPECT_EQ(got.steps, steps);
  EXPECT_EQ(got.skipped_steps, skipped_steps);
  EXPECT_EQ(got.skipped, skipped);
}

// On the host and on a device the same numbers.
TEST(StepCountsTest, StepsAndSkippedStepsAreCountedApart) {
  for (const bool on_device : {false, true}) {
    StepCounts counts(on_device ? std::optional<at::Device>(at::kCPU) : std::nullopt);
    const auto add = [&](bool skipped) {
      if (on_device) {
        counts.add(nonfinite(skipped ? 3 : 0));
      } else {
        counts.add(skipped);
      }
    };
    expect_counts(counts.read(), 0, 0, false);
    add(false);
    expect_counts(counts.read(), 1, 0, false);
    add(true);
    add(true);
    expect_counts(counts.read(), 1, 2, true);
    counts.add_nothing();
    expect_counts(counts.read(), 1, 2, false);
    add(true);
    add(false);
    expect_counts(counts.read(), 2, 3, false);
    counts.write({10, 20, true});
    expect_counts(counts.read(), 10, 20, true);
    add(false);
    expect_counts(counts.read(), 11, 20, false);
  }
}

TEST(StepCountsTest, ALeftOutStepIsSkippedButNotNonfinite) {
  for (const bool on_device : {false, true}) {
    StepCounts counts(on_device ? std::optional<at::Device>(at::kCPU) : std::nullopt);
    if (on_device) {
      counts.add(nonfinite(0), nonfinite(2));
    } else {
      counts.add(false, true);
    }
    expect_counts(counts.read(), 0, 1, true);
    EXPECT_FALSE(counts.read().nonfinite);
    EXPECT_EQ(counts.read().left_out_steps, 1);
    if (on_device) {
      counts.add(nonfinite(1), nonfinite(1));  // the former counts
    } else {
      counts.add(true);
    }
    expect_counts(counts.read(), 0, 2, true);
    EXPECT_TRUE(counts.read().nonfinite);
    EXPECT_EQ(counts.read().left_out_steps, 1);
  }
}

TEST(StepCountsTest, WithoutACheckEveryStepOnADeviceCounts) {
  StepCounts counts(at::kCPU);
  counts.add(nonfinite(1));
  counts.add(at::Tensor());
  expect_counts(counts.read(), 1, 1, false);
}

TEST(StepCountsTest, FetchedAreTheCountsOfTheMomentOfTheFetch) {
  StepCounts counts(at::kCPU);
  counts.add(nonfinite(1));
  counts.fetch();
  counts.add(nonfinite(0));
  expect_counts(counts.fetched(), 0, 1, true);
  expect_counts(counts.fetched(), 0, 1, true);
  counts.fetch();
  expect_counts(counts.fetched(), 1, 1, false);
  // Without a device they are known at once.
  StepCounts host(std::nullopt);
  host.add(true);
  expect_counts(host.fetched(), 0, 1, true);
}

}  // namespace
}  // namespace zero
