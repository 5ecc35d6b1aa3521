// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The answers of bookkeeping/layout.h, and rows that differ in length. plan_test and
// whole_parameters_test have the plans with such rows.
#include "bookkeeping/layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bookkeeping/reshard.h"

namespace zero {
namespace {

using c10::ScalarType;

constexpr int64_t kUnit = kAlignmentBytes / 4;  // floats in an alignment unit

// In an arena they are in reverse order at 0, 16, 64, 112 and 128, of 144 elements.
std::vector<ParameterInfo> parameters() {
  std::vector<ParameterInfo> result;
  for (const int64_t numel : {5, 16, 40, 33, 7}) result.push_back({numel, ScalarType::Float, 0});
  return result;
}

std::vector<ParameterRange> ranges(const Plan& plan) {
  std::vector<ParameterRange> result;
  for (int64_t rank = 0; rank < plan.arenas[0].world_size; ++rank) {
    for (const Segment& s : plan.segments(0, rank)) {
      result.push_back({s.parameter, s.begin, s.numel});
    }
  }
  return result;
}

// A checkpoint of a plan with equal or unequal rows loads into any other.
TEST(UnequalRowsTest, SegmentsOfAnyPlanReshardToThoseOfAnyOther) {
  std::vector<Plan> plans;
  for (const int64_t world_size : {1, 2, 3, 4}) {
    for (const Layout layout :
         {Layout::kContiguous, Layout::kPerParameter, Layout::kWholeParameters}) {
      plans.push_back(make_plan(parameters(), {world_size}, {layout, 0}));
    }
  }
  for (const Plan& from : plans) {
    for (const Plan& to : plans) {
      const std::vector<ParameterRange> stored = ranges(from), wanted = ranges(to);
      std::vector<std::vector<int64_t>> filled;  // of each wanted range, the parameter's element
      for (const ParameterRange& range : wanted) filled.emplace_back(range.numel, -1);
      for (const RangeOverlap& part : reshard(stored, wanted)) {
        ASSERT_EQ(stored[part.stored].parameter, wanted[part.wanted].parameter);
        for (int64_t i = 0; i < part.numel; ++i) {
          int64_t& element = filled[part.wanted].at(part.wanted_begin + i);
          EXPECT_EQ(element, -1);
          element = stored[part.stored].begin + part.stored_begin + i;
        }
      }
      for (size_t w = 0; w < wanted.size(); ++w) {
        for (int64_t i = 0; i < wanted[w].numel; ++i) {
          ASSERT_EQ(filled[w][i], wanted[w].begin + i);
        }
      }
    }
  }
}

TEST(UnequalRowsTest, TheFingerprintDependsOnWhereEachRowEnds) {
  const auto fingerprint = [](const std::vector<int64_t>& ends) {
    Plan plan = make_plan(parameters(), {3}, {Layout::kContiguous, 0});
    plan.buckets[0].rows = BucketRows(ends);
    return plan.fingerprint();
  };
  const uint64_t expected = fingerprint({kUnit, 4 * kUnit, 9 * kUnit});
  EXPECT_EQ(fingerprint({kUnit, 4 * kUnit, 9 * kUnit}), expected);
  EXPECT_NE(fingerprint({kUnit, 5 * kUnit, 9 * kUnit}), expected);
  EXPECT_NE(fingerprint({3 * kUnit, 6 * kUnit, 9 * kUnit}), expected);
  EXPECT_NE(fingerprint({0, 4 * kUnit, 9 * kUnit}), fingerprint({4 * kUnit, 4 * kUnit, 9 * kUnit}));
}

TEST(BucketRowsTest, EqualEndsAreEqualRows) {
  const BucketRows rows(std::vector<int64_t>{16, 32, 48});
  EXPECT_TRUE(rows.equal());
  EXPECT_EQ(rows.equal_numel(), 16);
  EXPECT_EQ(rows.total(), 48);
  EXPECT_EQ(BucketRows(3, 16).end(2), 48);
}

TEST(BucketRowsTest, EmptyRowsNeedNotBeNamed) {
  const BucketRows few(6, {1, 4}, {16, 48}), all(std::vector<int64_t>{0, 16, 16, 16, 48, 48});
  EXPECT_FALSE(few.equal());
  EXPECT_EQ(all.filled(), (std::vector<int64_t>{1, 4}));
  for (const BucketRows* rows : {&few, &all}) {
    const std::vector<int64_t> ends = {0, 16, 16, 16, 48, 48};
    EXPECT_EQ(rows->count(), 6);
    EXPECT_EQ(rows->total(), 48);
    for (int64_t r = 0; r < 6; ++r) {
      EXPECT_EQ(rows->begin(r), r == 0 ? 0 : ends[r - 1]) << r;
      EXPECT_EQ(rows->end(r), ends[r]) << r;
    }
  }
  EXPECT_TRUE(BucketRows(2, {0, 1}, {16, 32}).equal());
  EXPECT_FALSE(BucketRows(3, {0, 1}, {16, 32}).equal());
  EXPECT_TRUE(BucketRows(3, {}, {}).equal());
  EXPECT_EQ(BucketRows(3, {}, {}).total(), 0);
}

TEST(BucketRowsTest, RefusesFilledRowsThatDoNotAscend) {
  EXPECT_THROW(BucketRows(3, {1, 1}, {16, 32}), c10::Error);
  EXPECT_THROW(BucketRows(3, {0, 3}, {16, 32}), c10::Error);
  EXPECT_THROW(BucketRows(3, {-1, 1}, {16, 32}), c10::Error);
  EXPECT_THROW(BucketRows(3, {0, 1}, {16, 16}), c10::Error);
  EXPECT_THROW(BucketRows(3, {0, 1}, {16}), c10::Error);
}

TEST(BucketRowsTest, RefusesARowThatEndsBeforeItBegins) {
  EXPECT_THROW(BucketRows(std::vector<int64_t>{16, 8}), c10::Error);
  EXPECT_THROW(BucketRows(std::vector<int64_t>{-1, 8}), c10::Error);
}

// Those who need a [world_size, row] tensor ask for the length of every row.
TEST(BucketRowsTest, UnequalRowsHaveNoLengthInCommon) {
  const BucketRows rows(std::vector<int64_t>{16, 16, 48});
  try {
    rows.equal_numel();
    ADD_FAILURE() << "expected an error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("[world_size, row]"), std::string::npos);
  }
}

TEST(LayoutTest, AnswersForEachLayout) {
  const Arena floats{ScalarType::Float, 0, 2, 64, 50, {0}};
  const Arena halves{ScalarType::Half, 0, 2, 64, 50, {0}};
  struct Answers {
    Layout id;
    const char* name;
    bool in_place, master, dense;
    int64_t full;
  };
  const std::vector<Answers> all{
      {Layout::kContiguous, "contiguous", true, true, false, 64},
      {Layout::kPerParameter, "per parameter", false, false, true, 50},
      {Layout::kWholeParameters, "whole parameters", true, true, false, 64}};
  for (const Answers& expected : all) {
    SCOPED_TRACE(expected.name);
    const ParameterLayout& layout = layout_of(expected.id);
    EXPECT_EQ(layout.id(), expected.id);
    EXPECT_STREQ(layout.name(), expected.name);
    EXPECT_EQ(layout.in_place(), expected.in_place);
    EXPECT_EQ(layout.is_master(floats), expected.master);
    EXPECT_FALSE(layout.is_master(halves));
    EXPECT_EQ(layout.full_numel(floats), expected.full);
    EXPECT_EQ(layout.needs_dense_parameters(), expected.dense);
  }
}

// Gathers have buffers of their own as soon as one layout is not in place.
TEST(LayoutTest, GathersAreLimitedUnlessAllAreInPlace) {
  std::vector<ParameterInfo> parameters(3, {100, c10::ScalarType::Float, 0});
  parameters[1].layout = Layout::kWholeParameters;
  EXPECT_GT(max_gathers(make_plan(parameters, {2}, {})), size_t{1} << 32);
  parameters[2].layout = Layout::kPerParameter;
  EXPECT_EQ(max_gathers(make_plan(parameters, {2}, {})), 4U);
}

}  // namespace
}  // namespace zero
