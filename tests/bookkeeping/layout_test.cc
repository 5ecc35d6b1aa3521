// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The answers of bookkeeping/layout.h, and plans whose rows differ in length. Here they are made by
// hand; whole_parameters_test has those that make_plan() makes.
#include "bookkeeping/layout.h"

#include <gtest/gtest.h>

#include <numeric>
#include <utility>

#include "bookkeeping/memory.h"
#include "bookkeeping/reshard.h"

namespace zero {
namespace {

using c10::ScalarType;

constexpr int64_t kUnit = kAlignmentBytes / 4;  // floats in an alignment unit

// The plan of `layout` over one fp32 arena of `numels`, with one bucket, whose rows then end at
// `ends`. The bucket is as long as the last row says.
Plan with_rows(Layout layout, const std::vector<int64_t>& numels, std::vector<int64_t> ends) {
  std::vector<ParameterInfo> parameters;
  for (const int64_t numel : numels) parameters.push_back({numel, ScalarType::Float, 0});
  Plan plan = make_plan(parameters, {static_cast<int64_t>(ends.size())}, {layout, 0});
  plan.arenas[0].numel = ends.back();
  plan.buckets[0].rows = BucketRows(std::move(ends));
  return plan;
}

// Five parameters in reverse order at 0, 16, 64, 112 and 128, of 144 elements.
const std::vector<int64_t> kNumels = {5, 16, 40, 33, 7};

// Rows that cut through parameters, are empty in front, between and behind, and hold whole ones.
std::vector<std::vector<int64_t>> unequal_rows() {
  return {{kUnit, 9 * kUnit},
          {0, 4 * kUnit, 9 * kUnit},
          {kUnit, 4 * kUnit, 7 * kUnit, 9 * kUnit},
          {3 * kUnit, 3 * kUnit, 8 * kUnit, 8 * kUnit, 9 * kUnit, 9 * kUnit}};
}

// As make_plan() cuts this model for four ranks, but without the padding behind the last span: a
// parameter has spans of a fourth, and the last row is as long as what it has of them.
Plan trimmed_per_parameter() {
  // Chunks of 2, 9, 10, 4 and 2 elements, each in a unit: rows of five units.
  const int64_t row = 5 * kUnit;
  return with_rows(Layout::kPerParameter, kNumels, {row, 2 * row, 3 * row, 3 * row + 4 * kUnit});
}

std::vector<Plan> unequal_plans() {
  std::vector<Plan> plans;
  for (const std::vector<int64_t>& ends : unequal_rows()) {
    plans.push_back(with_rows(Layout::kContiguous, kNumels, ends));
  }
  plans.push_back(trimmed_per_parameter());
  return plans;
}

using Places = std::vector<std::pair<int64_t, int64_t>>;  // parameter and its element, or -1

Places by_spans(const Plan& plan) {
  const Bucket& bucket = plan.buckets[0];
  Places places(plan.bucket_numel(bucket), {-1, -1});
  for (const Slot& slot : bucket.slots) {
    for (const Span& span : plan.spans(bucket, slot)) {
      for (int64_t i = 0; i < span.numel; ++i) {
        auto& place = places.at(span.bucket_begin + i);
        EXPECT_EQ(place.first, -1) << "two parameters at " << span.bucket_begin + i;
        place = {slot.parameter, span.parameter_begin + i};
      }
    }
  }
  return places;
}

TEST(UnequalRowsTest, RowsFollowEachOtherAndBeginOnTheAlignment) {
  for (const Plan& plan : unequal_plans()) {
    const BucketRows& rows = plan.buckets[0].rows;
    EXPECT_FALSE(rows.equal());
    EXPECT_EQ(rows.count(), plan.arenas[0].world_size);
    EXPECT_EQ(rows.begin(0), 0);
    for (int64_t r = 0; r < rows.count(); ++r) {
      EXPECT_EQ(rows.begin(r) % kUnit, 0);
      EXPECT_EQ(rows.end(r) - rows.begin(r), rows.numel(r));
      EXPECT_EQ(rows.end(r), r + 1 < rows.count() ? rows.begin(r + 1) : rows.total());
    }
    EXPECT_EQ(plan.bucket_numel(plan.buckets[0]), rows.total());
  }
}

TEST(UnequalRowsTest, EveryElementIsInExactlyOneRow) {
  for (const Plan& plan : unequal_plans()) {
    std::vector<std::vector<int>> owners;
    for (const int64_t numel : kNumels) owners.emplace_back(numel, 0);
    for (int64_t rank = 0; rank < plan.arenas[0].world_size; ++rank) {
      for (const Segment& s : plan.segments(0, rank)) {
        EXPECT_GE(s.offset, 0);
        EXPECT_LE(s.offset + s.numel, plan.buckets[0].rows.numel(rank));
        for (int64_t i = 0; i < s.numel; ++i) ++owners[s.parameter].at(s.begin + i);
      }
    }
    for (const std::vector<int>& of_parameter : owners) {
      for (const int count : of_parameter) EXPECT_EQ(count, 1);
    }
  }
}

TEST(UnequalRowsTest, SegmentsAndPiecesDescribeTheSamePlaces) {
  for (const Plan& plan : unequal_plans()) {
    Places by_segments(plan.bucket_numel(plan.buckets[0]), {-1, -1});
    for (int64_t rank = 0; rank < plan.arenas[0].world_size; ++rank) {
      const int64_t row = plan.buckets[0].rows.begin(rank);
      for (const Segment& s : plan.segments(0, rank)) {
        for (int64_t i = 0; i < s.numel; ++i) {
          by_segments.at(row + s.offset + i) = {s.parameter, s.begin + i};
        }
      }
    }
    EXPECT_EQ(by_spans(plan), by_segments);
  }
}

// A layout of whole parameters is such a plan: every row holds whole ones, and each has one owner.
TEST(UnequalRowsTest, ARowCanHoldWholeParameters) {
  const Plan plan = with_rows(Layout::kContiguous, kNumels, {kUnit, 7 * kUnit, 7 * kUnit, 144});
  const std::vector<std::vector<int64_t>> owned = {{4}, {3, 2}, {}, {1, 0}};
  for (int64_t rank = 0; rank < 4; ++rank) {
    std::vector<int64_t> parameters;
    for (const Segment& s : plan.segments(0, rank)) {
      EXPECT_EQ(s.begin, 0);
      EXPECT_EQ(s.numel, kNumels[s.parameter]);
      EXPECT_EQ(s.offset, plan.parameter_offset[s.parameter] - plan.buckets[0].rows.begin(rank));
      parameters.push_back(s.parameter);
    }
    EXPECT_EQ(parameters, owned[rank]) << "rank " << rank;
  }
}

TEST(UnequalRowsTest, MemoryIsThatOfTheOwnRow) {
  const Plan plan = with_rows(Layout::kContiguous, kNumels, {0, 4 * kUnit, 9 * kUnit});
  MemoryOptions adam;
  adam.state_bytes = [](int64_t numel) { return 8 * numel; };
  MemoryReport sum;
  for (int64_t rank = 0; rank < 3; ++rank) {
    const MemoryReport report = expected_memory(plan, rank, adam);
    EXPECT_EQ(report.gradient_shards, 4 * plan.buckets[0].rows.numel(rank));
    EXPECT_EQ(report.working_parameters, 4 * 144);
    sum.gradient_shards += report.gradient_shards;
    sum.optimizer_state += report.optimizer_state;
  }
  EXPECT_EQ(sum.gradient_shards, 4 * 144);
  EXPECT_EQ(sum.optimizer_state,
            4 * 2 * std::accumulate(kNumels.begin(), kNumels.end(), int64_t{0}));
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

// A checkpoint of any of these plans, and of plans with equal rows, loads into any other.
TEST(UnequalRowsTest, SegmentsOfAnyPlanReshardToThoseOfAnyOther) {
  std::vector<Plan> plans = unequal_plans();
  for (const int64_t world_size : {1, 2, 3, 4}) {
    std::vector<ParameterInfo> parameters;
    for (const int64_t numel : kNumels) parameters.push_back({numel, ScalarType::Float, 0});
    plans.push_back(make_plan(parameters, {world_size}, {Layout::kContiguous, 0}));
    plans.push_back(make_plan(parameters, {world_size}, {Layout::kPerParameter, 0}));
    plans.push_back(make_plan(parameters, {world_size}, {Layout::kWholeParameters, 0}));
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
    return with_rows(Layout::kContiguous, kNumels, ends).fingerprint();
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
  const ParameterLayout& contiguous = layout_of(Layout::kContiguous);
  EXPECT_EQ(contiguous.id(), Layout::kContiguous);
  EXPECT_STREQ(contiguous.name(), "contiguous");
  EXPECT_TRUE(contiguous.in_place());
  EXPECT_TRUE(contiguous.is_master(floats));
  EXPECT_FALSE(contiguous.is_master(halves));
  EXPECT_EQ(contiguous.full_numel(floats), 64);
  EXPECT_FALSE(contiguous.needs_dense_parameters());

  const ParameterLayout& per_parameter = layout_of(Layout::kPerParameter);
  EXPECT_EQ(per_parameter.id(), Layout::kPerParameter);
  EXPECT_STREQ(per_parameter.name(), "per parameter");
  EXPECT_FALSE(per_parameter.in_place());
  EXPECT_FALSE(per_parameter.is_master(floats));
  EXPECT_FALSE(per_parameter.is_master(halves));
  EXPECT_EQ(per_parameter.full_numel(floats), 50);
  EXPECT_TRUE(per_parameter.needs_dense_parameters());

  const ParameterLayout& whole = layout_of(Layout::kWholeParameters);
  EXPECT_EQ(whole.id(), Layout::kWholeParameters);
  EXPECT_STREQ(whole.name(), "whole parameters");
  EXPECT_TRUE(whole.in_place());
  EXPECT_TRUE(whole.is_master(floats));
  EXPECT_FALSE(whole.is_master(halves));
  EXPECT_EQ(whole.full_numel(floats), 64);
  EXPECT_FALSE(whole.needs_dense_parameters());
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
