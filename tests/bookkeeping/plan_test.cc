// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The invariants at the top of bookkeeping/plan.h, one test each, over odd
// sizes, world sizes, layouts and bucket sizes.
#include "bookkeeping/plan.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <random>

#include "bookkeeping/layout.h"

namespace zero {
namespace {

using c10::ScalarType;

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kPerParameter,
                               Layout::kWholeParameters};

struct Case {
  std::vector<ParameterInfo> parameters;
  std::vector<int64_t> world_sizes;
  PlanOptions options;
};

// Two dtypes and two domains in one model, sizes 0, 1, primes and one large.
std::vector<ParameterInfo> odd_parameters() {
  std::vector<ParameterInfo> result;
  const int64_t sizes[] = {1, 0, 7, 123 * 253, 253, 64, 3, 1021, 16, 0, 2, 4096, 5, 1};
  for (size_t i = 0; i < std::size(sizes); ++i) {
    result.push_back({sizes[i], i % 5 == 0 ? ScalarType::BFloat16 : ScalarType::Float,
                      static_cast<int64_t>(i % 7 == 3 ? 1 : 0)});
    if (sizes[i] > 200) result.back().block = sizes[i] > 1000 ? 256 : 64;
  }
  return result;
}

// Every layout for all parameters, and all of them in one plan.
void for_each_case(const std::function<void(const Case&, const Plan&)>& check) {
  for (int64_t world_size : {1, 2, 3, 4, 5, 8}) {
    for (int64_t bucket_bytes : {0, 1, 300, 4096, 1 << 20}) {
      Case c{odd_parameters(),
             {world_size, (world_size + 1) / 2},
             {Layout::kContiguous, bucket_bytes}};
      for (size_t i = 0; i < c.parameters.size(); ++i) c.parameters[i].layout = kLayouts[i % 3];
      SCOPED_TRACE(::testing::Message() << "W " << world_size << " bytes " << bucket_bytes);
      check(c, make_plan(c.parameters, c.world_sizes, c.options));
    }
    for (Layout layout : kLayouts) {
      for (int64_t bucket_bytes : {0, 1, 300, 4096, 1 << 20}) {
        Case c{odd_parameters(), {world_size, (world_size + 1) / 2}, {layout, bucket_bytes}};
        SCOPED_TRACE(::testing::Message() << "W " << world_size << " layout "
                                          << static_cast<int>(layout) << " bytes " << bucket_bytes);
        check(c, make_plan(c.parameters, c.world_sizes, c.options));
      }
    }
  }
}

TEST(PlanTest, EveryElementLiesInExactlyOneBucketAndRow) {
  for_each_case([](const Case& c, const Plan& plan) {
    std::vector<std::vector<int>> by_segment, by_span;
    for (const ParameterInfo& p : c.parameters) {
      by_segment.emplace_back(p.numel, 0);
      by_span.emplace_back(p.numel, 0);
    }
    for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
      const Bucket& bucket = plan.buckets[b];
      std::vector<int> taken(plan.bucket_numel(bucket), 0);
      for (const Slot& slot : bucket.slots) {
        for (const Span& span : plan.spans(bucket, slot)) {
          for (int64_t i = 0; i < span.numel; ++i) {
            ++by_span[slot.parameter][span.parameter_begin + i];
            EXPECT_EQ(taken[span.bucket_begin + i]++, 0);
          }
        }
      }
      for (int64_t rank = 0; rank < plan.arena_of(bucket).world_size; ++rank) {
        for (const Segment& s : plan.segments(b, rank)) {
          ASSERT_LE(s.offset + s.numel, bucket.rows.numel(rank));
          for (int64_t i = 0; i < s.numel; ++i) ++by_segment[s.parameter][s.begin + i];
        }
      }
    }
    for (size_t p = 0; p < c.parameters.size(); ++p) {
      for (int count : by_segment[p]) ASSERT_EQ(count, 1) << "parameter " << p;
      for (int count : by_span[p]) ASSERT_EQ(count, 1) << "parameter " << p;
    }
  });
}

TEST(PlanTest, SegmentsAndPiecesDescribeTheSamePlaces) {
  for_each_case([](const Case&, const Plan& plan) {
    for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
      const Bucket& bucket = plan.buckets[b];
      std::vector<std::pair<int64_t, int64_t>> from_spans(plan.bucket_numel(bucket), {-1, -1});
      auto from_segments = from_spans;
      for (const Slot& slot : bucket.slots) {
        for (const Span& span : plan.spans(bucket, slot)) {
          for (int64_t i = 0; i < span.numel; ++i) {
            from_spans[span.bucket_begin + i] = {slot.parameter, span.parameter_begin + i};
          }
        }
      }
      for (int64_t rank = 0; rank < plan.arena_of(bucket).world_size; ++rank) {
        for (const Segment& s : plan.segments(b, rank)) {
          for (int64_t i = 0; i < s.numel; ++i) {
            from_segments[bucket.rows.begin(rank) + s.offset + i] = {s.parameter, s.begin + i};
          }
        }
      }
      ASSERT_EQ(from_spans, from_segments);
    }
  });
}

TEST(PlanTest, RowsAreAlignedAndEquallyLongUnlessParametersAreWhole) {
  for_each_case([](const Case&, const Plan& plan) {
    for (const Bucket& bucket : plan.buckets) {
      const auto element = static_cast<int64_t>(c10::elementSize(plan.arena_of(bucket).dtype));
      EXPECT_EQ(bucket.rows.count(), plan.arena_of(bucket).world_size);
      EXPECT_GT(bucket.rows.total(), 0);
      EXPECT_TRUE(bucket.rows.equal() || plan.layout_of(bucket).id() == Layout::kWholeParameters);
      for (int64_t r = 0; r < bucket.rows.count(); ++r) {
        EXPECT_EQ(bucket.rows.end(r) * element % kAlignmentBytes, 0);
      }
    }
  });
}

TEST(PlanTest, ParametersInPlaceAreAlignedAndBucketsCoverTheArena) {
  for_each_case([](const Case& c, const Plan& plan) {
    for (size_t p = 0; p < c.parameters.size(); ++p) {
      if (!plan.arenas[plan.parameter_arena[p]].layout->in_place()) continue;
      const auto element = static_cast<int64_t>(c10::elementSize(c.parameters[p].dtype));
      EXPECT_EQ(plan.parameter_offset[p] * element % kAlignmentBytes, 0);
    }
    std::vector<int64_t> end(plan.arenas.size(), 0);
    for (const Bucket& bucket : plan.buckets) {
      EXPECT_EQ(bucket.begin, end[bucket.arena]);
      end[bucket.arena] += plan.bucket_numel(bucket);
    }
    for (size_t a = 0; a < end.size(); ++a) EXPECT_EQ(end[a], plan.arenas[a].numel);
  });
}

TEST(PlanTest, PaddingIsBounded) {
  for_each_case([](const Case& c, const Plan& plan) {
    for (const Arena& arena : plan.arenas) {
      const int64_t align = kAlignmentBytes / static_cast<int64_t>(c10::elementSize(arena.dtype));
      const int64_t padding = arena.numel - arena.parameter_numel;
      int64_t longest = align, units = 0;
      for (const int64_t p : arena.parameters) {
        const int64_t unit = std::max(align, c.parameters[p].block);
        longest = std::max(longest, unit);
        units += unit;
      }
      const auto count = static_cast<int64_t>(arena.parameters.size());
      if (arena.layout->id() == Layout::kContiguous) {
        EXPECT_LE(padding, units + arena.world_size * longest);
      } else if (arena.layout->id() == Layout::kWholeParameters) {
        EXPECT_LE(padding, units - count);
      } else {
        EXPECT_LE(padding, arena.world_size * units);
      }
    }
  });
}

TEST(PlanTest, RowsCutParametersAtTheirBlocks) {
  int64_t cuts = 0;
  for_each_case([&](const Case& c, const Plan& plan) {
    for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
      const int64_t ranks = plan.arena_of(plan.buckets[b]).world_size;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        for (const Segment& s : plan.segments(b, rank)) {
          EXPECT_EQ(s.begin % c.parameters[s.parameter].block, 0);
          cuts += s.begin > 0 && c.parameters[s.parameter].block > 1 ? 1 : 0;
        }
      }
    }
  });
  EXPECT_GT(cuts, 100);
}

TEST(PlanTest, BucketsAreNumberedByTheLastParameterTheyWaitFor) {
  for_each_case([](const Case&, const Plan& plan) {
    int64_t previous = -1;
    for (const Bucket& bucket : plan.buckets) {
      int64_t first_registered = INT64_MAX;
      for (const Slot& s : bucket.slots) {
        first_registered = std::min(first_registered, s.parameter);
      }
      if (previous >= 0) {
        EXPECT_LE(first_registered, previous);
      }
      previous = first_registered;
    }
  });
}

TEST(PlanTest, DependsOnItsArgumentsAlone) {
  for_each_case([](const Case& c, const Plan& plan) {
    EXPECT_EQ(make_plan(c.parameters, c.world_sizes, c.options).fingerprint(), plan.fingerprint());
    Case other = c;
    other.parameters[3].numel += 64;
    EXPECT_NE(make_plan(other.parameters, other.world_sizes, other.options).fingerprint(),
              plan.fingerprint());
  });
}

// Manifests of stored checkpoints hold them.
TEST(PlanTest, FingerprintsAreThoseOfEarlierVersions) {
  const std::vector<ParameterInfo> parameters = {{1000, ScalarType::Float, 0},
                                                 {77, ScalarType::BFloat16, 0}};
  EXPECT_EQ(make_plan(parameters, {3}, {Layout::kContiguous, 300}).fingerprint(),
            0xd403d393b8baba1aULL);
  EXPECT_EQ(make_plan(parameters, {3}, {Layout::kPerParameter, 300}).fingerprint(),
            0x47a8df27555bde35ULL);
}

TEST(PlanTest, BucketsAreAboutAsLargeAsAsked) {
  const std::vector<ParameterInfo> parameters(100, {10000, ScalarType::Float, 0});
  for (Layout layout : kLayouts) {
    const Plan plan = make_plan(parameters, {4}, {layout, 400000});
    EXPECT_GE(plan.buckets.size(), 10u);
    EXPECT_LE(plan.buckets.size(), 12u);
  }
}

TEST(PlanTest, DefaultBucketsGrowWithTheRanksBetweenTheirBounds) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  // Ranks, and MiB on a CPU and on a GPU.
  for (const auto& [ranks, cpu, gpu] : std::vector<std::array<int64_t, 3>>{
           {1, 4, 32}, {16, 4, 32}, {20, 5, 32}, {256, 64, 64}, {512, 64, 128}, {4096, 64, 128}}) {
    EXPECT_EQ(default_bucket_bytes(ranks), cpu * kMiB) << ranks;
    EXPECT_EQ(default_bucket_bytes(ranks, /*on_gpu=*/true), gpu * kMiB) << ranks;
  }
  const std::vector<ParameterInfo> parameters(40, {kMiB / 4, ScalarType::Float, 0});  // 40 MiB
  EXPECT_EQ(make_plan(parameters, {2}, {Layout::kContiguous}).buckets.size(), 10u);
}

TEST(PlanTest, MoreRanksThanElements) {
  for (Layout layout : kLayouts) {
    const Plan plan = make_plan({{1, ScalarType::Float, 0}}, {8}, {layout});
    ASSERT_EQ(plan.buckets.size(), 1u);
    int owners = 0;
    for (int64_t rank = 0; rank < 8; ++rank) owners += plan.segments(0, rank).empty() ? 0 : 1;
    EXPECT_EQ(owners, 1);
  }
}

TEST(PlanTest, RefusesWhatItCannotPlan) {
  EXPECT_THROW(make_plan({{-1, ScalarType::Float, 0}}, {2}, {}), c10::Error);
  EXPECT_THROW(make_plan({{1, ScalarType::Float, 1}}, {2}, {}), c10::Error);
  EXPECT_THROW(make_plan({{1, ScalarType::Float, 0}}, {0}, {}), c10::Error);
  EXPECT_THROW(make_plan({{1, ScalarType::Long, 0}}, {2}, {}), c10::Error);
  EXPECT_THROW(make_plan({{1, ScalarType::Float, 0}}, {2}, {Layout::kContiguous, -1}), c10::Error);
  const PlanOptions whole{Layout::kWholeParameters};
  EXPECT_THROW(make_plan({{1, ScalarType::Float, 0, -1}}, {2}, whole), c10::Error);
  EXPECT_THROW(make_plan({{1, ScalarType::Float, 0}}, {2}, {Layout::kWholeParameters, 0, false, 0}),
               c10::Error);
  const ParameterInfo costly{1, ScalarType::Float, 0, int64_t{1} << 61};
  EXPECT_THROW(make_plan({costly, costly}, {2}, whole), c10::Error);
  ParameterInfo odd{1000, ScalarType::Float, 0};
  odd.block = 100;
  EXPECT_THROW(make_plan({odd}, {2}, {}), c10::Error);
}

}  // namespace
}  // namespace zero
