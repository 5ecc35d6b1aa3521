// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/parameter_gathers.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;

// Each parameter fills more than a bucket of the smallest size.
constexpr int kParameters = 8;
constexpr int64_t kNumel = 70;

Tensors zeros() {
  Tensors result;
  for (int p = 0; p < kParameters; ++p) result.push_back(at::zeros({kNumel}));
  return result;
}

at::Tensor updated(int64_t p) { return random_tensor({kNumel}, p); }

struct Rank {
  Rank(const Group& group, Layout layout, const ZeroOptions& options_in = {})
      : rank(group.rank()),
        options(options_in),
        flat(zeros(), group.world_size(), {layout, 256}),
        arena(flat.plan, flat.table, flat.pool),
        comms(group),
        gathers(flat.plan, flat.table, arena, comms, options) {
    comms.connect(make_domains(group, ZeroOptions(), 1));
  }
  // Writes this rank's rows, as an update does.
  void start() {
    gathers.begin();
    for (int64_t b = 0; b < flat.buckets(); ++b) {
      gathers.keep(b);
      const Rows rows = arena.rows(b);
      for (const Segment& s : flat.plan.segments(b, rank)) {
        rows.row(rank).narrow(0, s.offset, s.numel).copy_(part_of(updated(s.parameter), s));
      }
      gathers.start(b, rows);
    }
  }
  // Whether the other one of two ranks' elements of a bucket are there.
  bool has_other_row(int64_t b) {
    const at::Tensor row = arena.rows(b).row(1 - rank);
    return std::ranges::all_of(flat.plan.segments(b, 1 - rank), [&](const Segment& s) {
      return at::equal(row.narrow(0, s.offset, s.numel), part_of(updated(s.parameter), s));
    });
  }
  bool is_updated(int64_t p) const { return at::equal(flat.model.values[p].detach(), updated(p)); }

  const int rank;
  const ZeroOptions options;
  FlatModel flat;
  WorkingArena arena;
  OptimizerCommunicators comms;
  ParameterGathers gathers;
};

void on_ranks(int world_size, Layout layout, const std::function<void(Rank&)>& body) {
  run_ranks(world_size,
            [&](const Group& group) {
              Rank rank(group, layout);
              body(rank);
            },
            {.timeout = std::chrono::seconds(60)});
}

TEST(ParameterGathersTest, AllParametersHaveEveryRanksRowsWhenTheyAreFinished) {
  for (const int world_size : {1, 2, 3, 4}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
      on_ranks(world_size, layout, [](Rank& r) {
        r.start();
        r.gathers.finish();
        for (int p = 0; p < kParameters; ++p) EXPECT_TRUE(r.is_updated(p)) << p;
        // There is nothing more to wait for.
        r.gathers.finish();
      });
    }
  }
}

TEST(ParameterGathersTest, AModuleWaitsForTheBucketsOfItsParametersAlone) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    on_ranks(2, layout, [&](Rank& r) {
      r.start();
      // The buckets of the first parameters are the last ones.
      torch::nn::Module part;
      part.register_parameter("first", r.flat.model.values[0]);
      const int64_t before = r.flat.buckets();
      ASSERT_GT(before, 4);
      EXPECT_FALSE(r.is_updated(0));
      r.gathers.finish_those_of(part);
      EXPECT_TRUE(r.is_updated(0));
      EXPECT_FALSE(r.is_updated(2));
      // Of one parameter too, which has several.
      ASSERT_TRUE(layout == Layout::kPerParameter || r.flat.plan.parameter_buckets[2].size() > 1);
      r.gathers.finish_that_of(r.flat.model.values[2]);
      EXPECT_TRUE(r.is_updated(2));
      r.gathers.finish();
      for (int p = 0; p < kParameters; ++p) EXPECT_TRUE(r.is_updated(p)) << p;
    });
  }
}

TEST(ParameterGathersTest, AFewBuffersAreInUseHoweverManyBucketsThereAre) {
  on_ranks(2, Layout::kPerParameter, [](Rank& r) {
    int64_t largest = 0;
    for (int64_t b = 0; b < r.flat.buckets(); ++b) {
      largest = std::max(largest, 2 * r.flat.row_numel(b) * 4);
    }
    ASSERT_GT(r.flat.buckets(), 6);
    r.start();
    r.gathers.finish();
    EXPECT_LE(r.flat.pool.peak_bytes(), 5 * largest);
  });
}

// What is encoded takes memory until its gather ends.
TEST(ParameterGathersTest, AFewGathersOfChangesAreUnderWayUnlessTheyAreToOverlap) {
  for (const bool overlap : {false, true}) {
    run_ranks(2,
              [&](const Group& group) {
                Rank r(group, Layout::kContiguous,
                       ZeroOptions().gather_wire(GatherWire::kChanges).overlap_gather(overlap));
                ASSERT_GT(r.flat.buckets(), 6);
                r.start();
                int64_t under_way = 0;
                for (int64_t b = 0; b < r.flat.buckets(); ++b) under_way += !r.has_other_row(b);
                EXPECT_EQ(under_way, overlap ? r.flat.buckets() : 4);
                // That of the last parameter was the first one.
                EXPECT_EQ(r.is_updated(kParameters - 1), !overlap);
                EXPECT_FALSE(r.is_updated(0));
                r.gathers.finish();
                for (int p = 0; p < kParameters; ++p) EXPECT_TRUE(r.is_updated(p)) << p;
                EXPECT_LT(r.comms.domains[0].data->traffic().gather_bytes_sent,
                          r.flat.buckets() * (r.flat.row_numel(0) * 4 + 16) + 1);
              },
              {.ranks_per_machine = 1, .timeout = std::chrono::seconds(60)});
  }
}

}  // namespace
}  // namespace zero
