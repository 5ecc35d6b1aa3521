// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Layout::kWholeParameters: one owner for each parameter, on random shapes and on those of GPT-2
// and Llama. plan_test and layout_test have what holds for every layout.
#include "bookkeeping/whole_parameters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "bookkeeping/layout.h"
#include "bookkeeping/memory.h"

namespace zero {
namespace {

using c10::ScalarType;

constexpr int64_t kWorldSizes[] = {1, 2, 3, 4, 5, 8, 1024, 16384};

// Up to 60 parameters: scalars, vectors, matrices, empty ones and some that are much larger, in two
// dtypes and two domains, with costs that have nothing to do with sizes.
std::vector<ParameterInfo> random_parameters(uint64_t seed) {
  std::mt19937_64 generator(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(generator() % n); };
  std::vector<ParameterInfo> result(1 + below(60));
  for (ParameterInfo& p : result) {
    const int64_t kind = below(10);
    p.numel = kind == 0 ? 0 : kind < 4 ? 1 + below(70) : kind < 9 ? 1 + below(5000) : below(100000);
    p.dtype = below(3) == 0 ? ScalarType::BFloat16 : ScalarType::Float;
    p.domain = below(4) == 0 ? 1 : 0;
    if (below(2) == 0) p.cost = below(100000);
  }
  return result;
}

PlanOptions whole(std::optional<int64_t> bucket_bytes = 0, int64_t ranks_per_machine = 1) {
  return {Layout::kWholeParameters, bucket_bytes, /*on_gpu=*/false, ranks_per_machine};
}

// Largest over mean: 1 is perfect, and the number of ranks is as bad as it can be.
struct Imbalance {
  double numel = 1;  // elements of a rank: masters, state and gradient shards
  double cost = 1;   // cost of a rank: time of a step
  // Sum over buckets of the longest row over that of the mean row: bytes of an exchange that pads
  // rows to the longest, or time of one that sends a bucket at a time.
  double rows = 1;
};

double over_mean(int64_t most, int64_t sum, int64_t count) {
  return sum == 0
             ? 1
             : static_cast<double>(most) * static_cast<double>(count) / static_cast<double>(sum);
}

// Returns the imbalance of the parameters of `domain` that have one owner, in a plan over
// `parameters`; 1 throughout for a domain without any.
Imbalance imbalance(const Plan& plan, c10::ArrayRef<ParameterInfo> parameters, int64_t domain) {
  std::vector<ParameterLoad> loads;  // of each rank
  ParameterLoad sum, most;
  int64_t longest_rows = 0;
  for (const Bucket& bucket : plan.buckets) {
    if (plan.arena_of(bucket).domain != domain || !plan.layout_of(bucket).is_whole()) continue;
    loads.resize(plan.arena_of(bucket).world_size);
    int64_t longest = 0, row = -1, row_numel = 0;  // slots are in the order of rows
    for (const Slot& slot : bucket.slots) {
      const ParameterLoad load = load_of(parameters[slot.parameter]);
      const int64_t owner = plan.parameter_owner[slot.parameter];
      row_numel = load.numel + (owner == row ? row_numel : 0);
      row = owner;
      longest = std::max(longest, row_numel);
      loads[owner].numel += load.numel;
      loads[owner].cost += load.cost;
      sum.numel += load.numel;
      sum.cost += load.cost;
    }
    longest_rows += longest;
  }
  for (const ParameterLoad& load : loads) {
    most.numel = std::max(most.numel, load.numel);
    most.cost = std::max(most.cost, load.cost);
  }
  const auto ranks = static_cast<int64_t>(loads.size());
  return {over_mean(most.numel, sum.numel, ranks), over_mean(most.cost, sum.cost, ranks),
          over_mean(longest_rows, sum.numel, ranks)};
}

void for_each_random_plan(
    const std::function<void(const std::vector<ParameterInfo>&, const Plan&)>& check) {
  for (const int64_t world_size : kWorldSizes) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      const std::vector<ParameterInfo> parameters = random_parameters(seed);
      const int64_t bytes[] = {0, 1, 3000, 100000};
      const PlanOptions options = whole(bytes[seed % 4], 1 + static_cast<int64_t>(seed % 3) * 4);
      SCOPED_TRACE(::testing::Message() << "W " << world_size << " seed " << seed);
      check(parameters, make_plan(parameters, {world_size, (world_size + 1) / 2}, options));
    }
  }
}

TEST(WholeParametersTest, EveryParameterIsInOneBucketAndInTheRowOfItsOwner) {
  for_each_random_plan([](const std::vector<ParameterInfo>& parameters, const Plan& plan) {
    ASSERT_EQ(plan.parameter_owner.size(), parameters.size());
    std::vector<int> slots(parameters.size(), 0), segments(parameters.size(), 0);
    for (int64_t b = 0; b < static_cast<int64_t>(plan.buckets.size()); ++b) {
      const Bucket& bucket = plan.buckets[b];
      for (const Slot& slot : bucket.slots) {
        const std::vector<Span> spans = plan.spans(bucket, slot);
        ASSERT_EQ(spans.size(), 1U);
        EXPECT_EQ(spans[0].parameter_begin, 0);
        EXPECT_EQ(spans[0].numel, parameters[slot.parameter].numel);
        EXPECT_EQ(bucket.begin + spans[0].bucket_begin, plan.parameter_offset[slot.parameter]);
        EXPECT_EQ(plan.parameter_buckets[slot.parameter], std::vector<int64_t>{b});
        ++slots[slot.parameter];
      }
      std::set<int64_t> rows(bucket.rows.filled().begin(), bucket.rows.filled().end());
      for (int64_t r : {int64_t{0}, bucket.rows.count() / 2, bucket.rows.count() - 1})
        rows.insert(r);
      if (bucket.rows.equal()) {
        for (int64_t r = 0; r < bucket.rows.count(); ++r) rows.insert(r);
      }
      for (const int64_t rank : rows) {
        int64_t end = 0;
        for (const Segment& s : plan.segments(b, rank)) {
          EXPECT_EQ(plan.parameter_owner[s.parameter], rank);
          EXPECT_EQ(s.begin, 0);
          EXPECT_EQ(s.numel, parameters[s.parameter].numel);
          EXPECT_EQ(s.offset, end) << "rows have no gaps but those of the alignment";
          end = round_up(s.offset + s.numel, alignment_of(plan.arena_of(bucket).dtype));
          ++segments[s.parameter];
        }
        EXPECT_EQ(end, bucket.rows.numel(rank));
      }
    }
    for (size_t p = 0; p < parameters.size(); ++p) {
      EXPECT_EQ(slots[p], parameters[p].numel == 0 ? 0 : 1);
      EXPECT_EQ(segments[p], slots[p]);
      EXPECT_GE(plan.parameter_owner[p], 0);
      EXPECT_LT(plan.parameter_owner[p], plan.arenas[plan.parameter_arena[p]].world_size);
    }
  });
}

TEST(WholeParametersTest, PlacesInTheArenaDoNotOverlap) {
  for_each_random_plan([](const std::vector<ParameterInfo>& parameters, const Plan& plan) {
    for (const Arena& arena : plan.arenas) {
      int64_t end = 0, numel = 0;
      for (const int64_t p : arena.parameters) {
        EXPECT_EQ(plan.parameter_offset[p], end);
        end = round_up(end + parameters[p].numel, alignment_of(arena.dtype));
        numel += parameters[p].numel;
      }
      EXPECT_EQ(end, arena.numel);
      EXPECT_EQ(numel, arena.parameter_numel);
    }
  });
}

// Buckets of an arena are in reverse registration order: a parameter is never in an earlier bucket
// than one that was registered after it.
TEST(WholeParametersTest, BucketsFollowReverseRegistration) {
  for_each_random_plan([](const std::vector<ParameterInfo>&, const Plan& plan) {
    std::vector<int64_t> least(plan.arenas.size(), INT64_MAX);
    for (const Bucket& bucket : plan.buckets) {
      int64_t now = INT64_MAX;
      for (const Slot& slot : bucket.slots) {
        EXPECT_LT(slot.parameter, least[bucket.arena]);
        now = std::min(now, slot.parameter);
      }
      least[bucket.arena] = now;
    }
  });
}

TEST(WholeParametersTest, ABucketEndsBehindTheParameterThatFillsIt) {
  const std::vector<ParameterInfo> parameters(10, {100, ScalarType::Float, 0});  // 448 bytes each
  EXPECT_EQ(make_plan(parameters, {3}, whole(0)).buckets.size(), 1U);
  EXPECT_EQ(make_plan(parameters, {3}, whole(1)).buckets.size(), 10U);
  EXPECT_EQ(make_plan(parameters, {3}, whole(896)).buckets.size(), 5U);
  EXPECT_EQ(make_plan(parameters, {3}, whole(897)).buckets.size(), 4U);
}

// The bounds in bookkeeping/whole_parameters.h.
TEST(WholeParametersTest, TheLargestLoadIsBoundedByTheLargestParameter) {
  for_each_random_plan([](const std::vector<ParameterInfo>& parameters, const Plan& plan) {
    for (const int64_t domain : {0, 1}) {
      ParameterLoad sum, most;
      int64_t world_size = 0;
      bool proportional = true;
      for (size_t p = 0; p < parameters.size(); ++p) {
        if (parameters[p].domain != domain) continue;
        const ParameterLoad load = load_of(parameters[p]);
        sum = {sum.numel + load.numel, sum.cost + load.cost};
        most = {std::max(most.numel, load.numel), std::max(most.cost, load.cost)};
        proportional = proportional && load.numel == load.cost;
        world_size = plan.arenas[plan.parameter_arena[p]].world_size;
      }
      const Imbalance i = imbalance(plan, parameters, domain);
      EXPECT_GE(i.numel, 1);
      EXPECT_GE(i.cost, 1);
      EXPECT_GE(i.rows, i.numel * (1 - 1e-9)) << "rows of buckets cannot be more even than loads";
      if (sum.numel == 0) continue;
      const double largest =
          std::max(static_cast<double>(most.numel) / sum.numel,
                   static_cast<double>(most.cost) / std::max<int64_t>(1, sum.cost));
      const double bound = proportional ? 1 + (world_size - 1) * largest : 2 + world_size * largest;
      EXPECT_LE(std::max(i.numel, i.cost), bound * (1 + 1e-9));
      EXPECT_LE(i.rows, world_size);
    }
  });
}

TEST(WholeParametersTest, OneCriterionKeepsTheTighterBound) {
  for (const int64_t world_size : kWorldSizes) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      std::vector<ParameterInfo> parameters = random_parameters(seed);
      int64_t sum = 0, most = 0;
      for (ParameterInfo& p : parameters) {
        p.domain = 0;
        p.cost = 7 * load_of(p).numel;
        sum += load_of(p).numel;
        most = std::max(most, load_of(p).numel);
      }
      if (sum == 0) continue;
      const Imbalance i = imbalance(make_plan(parameters, {world_size}, whole()), parameters, 0);
      const double bound =
          1 + (world_size - 1) * static_cast<double>(most) / static_cast<double>(sum);
      EXPECT_LE(i.numel, bound * (1 + 1e-9)) << "W " << world_size << " seed " << seed;
      EXPECT_NEAR(i.cost, i.numel, 1e-9);
    }
  }
}

// Five matrices of bf16 and three of fp32 on eight ranks.
TEST(WholeParametersTest, DtypesOfADomainShareItsRanks) {
  std::vector<ParameterInfo> parameters(5, {640, ScalarType::BFloat16, 0});
  parameters.resize(8, {640, ScalarType::Float, 0});
  const Plan plan = make_plan(parameters, {8}, whole());
  EXPECT_EQ(std::set<int64_t>(plan.parameter_owner.begin(), plan.parameter_owner.end()).size(), 8U);
  EXPECT_EQ(imbalance(plan, parameters, 0).numel, 1);
}

TEST(WholeParametersTest, FewParametersAreSpreadOverMachines) {
  const std::map<int64_t, std::set<int64_t>> loads_of_machines = {
      {1, {0, 640, 6400}}, {4, {6400 + 640, 2 * 6400}}, {8, {3 * 6400 + 640}}};
  for (const auto& [per_machine, expected] : loads_of_machines) {
    // 24 large ones, then 8 that are smaller, on 64 ranks.
    std::vector<ParameterInfo> parameters(24, {6400, ScalarType::Float, 0});
    parameters.resize(32, {640, ScalarType::Float, 0});
    const Plan plan = make_plan(parameters, {64}, whole(0, per_machine));
    std::vector<int64_t> load(64 / per_machine, 0);
    for (size_t p = 0; p < parameters.size(); ++p) {
      load[plan.parameter_owner[p] / per_machine] += parameters[p].numel;
    }
    EXPECT_EQ(std::set<int64_t>(load.begin(), load.end()), expected) << per_machine;
    EXPECT_EQ(std::set<int64_t>(plan.parameter_owner.begin(), plan.parameter_owner.end()).size(),
              32U);
  }
}

TEST(WholeParametersTest, TheLastMachineMayHaveFewerRanks) {
  const std::vector<ParameterInfo> parameters(5, {640, ScalarType::Float, 0});
  const Plan plan = make_plan(parameters, {5}, whole(0, 4));
  EXPECT_EQ(std::set<int64_t>(plan.parameter_owner.begin(), plan.parameter_owner.end()).size(), 5U);
}

// ---- Models ----

struct Matrix {
  int64_t rows = 0, columns = 0;
  bool hidden = false;  // one for Muon
};
using Shapes = std::vector<Matrix>;

Shapes gpt2(int64_t width, int64_t layers) {
  Shapes s = {{50257, width}, {1024, width}};
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (const Matrix& m : Shapes{{width, 1},
                                  {width, 1},
                                  {3 * width, width, true},
                                  {3 * width, 1},
                                  {width, width, true},
                                  {width, 1},
                                  {width, 1},
                                  {width, 1},
                                  {4 * width, width, true},
                                  {4 * width, 1},
                                  {width, 4 * width, true},
                                  {width, 1}}) {
      s.push_back(m);
    }
  }
  s.insert(s.end(), 2, {width, 1});
  return s;
}

Shapes llama(int64_t vocabulary, int64_t width, int64_t layers, int64_t inner, int64_t key_value) {
  Shapes s = {{vocabulary, width}};
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (const Matrix& m : Shapes{{width, width, true},
                                  {key_value, width, true},
                                  {key_value, width, true},
                                  {width, width, true},
                                  {inner, width, true},
                                  {inner, width, true},
                                  {width, inner, true},
                                  {width, 1},
                                  {width, 1}}) {
      s.push_back(m);
    }
  }
  s.push_back({width, 1});
  s.push_back({vocabulary, width});
  return s;
}

// All parameters with their size as cost, or those of Muon with its cost.
std::vector<ParameterInfo> parameters_of(const Shapes& shapes, bool muon) {
  std::vector<ParameterInfo> result;
  for (const Matrix& m : shapes) {
    if (muon && !m.hidden) continue;
    result.push_back({m.rows * m.columns, ScalarType::BFloat16, 0});
    if (muon) result.back().cost = newton_schulz_cost(m.rows, m.columns);
  }
  return result;
}

double largest_over_mean(const std::vector<ParameterInfo>& parameters, int64_t world_size) {
  int64_t sum = 0, most = 0;
  for (const ParameterInfo& p : parameters) {
    sum += load_of(p).numel;
    most = std::max(most, load_of(p).numel);
  }
  return static_cast<double>(most) * static_cast<double>(world_size) / static_cast<double>(sum);
}

const std::vector<std::pair<std::string, Shapes>>& models() {
  static const std::vector<std::pair<std::string, Shapes>> models = {
      {"GPT-2 124M", gpt2(768, 12)},
      {"GPT-2 350M", gpt2(1024, 24)},
      {"GPT-2 1.5B", gpt2(1600, 48)},
      {"Llama 7B", llama(32000, 4096, 32, 11008, 4096)},
      {"Llama 70B", llama(32000, 8192, 80, 28672, 1024)}};
  return models;
}

// Memory and time of a step on eight ranks, and masters and state within 5 % of an eighth. Only an
// embedding that is larger than an eighth of all parameters is in the way, and then it alone is
// the load of its owner.
TEST(WholeParametersTest, LoadsOfGpt2AndLlamaAreWithinFivePerCentOnEightRanks) {
  std::printf("%-11s %-5s %7s %7s %7s %7s\n", "W = 8", "", "largest", "numel", "cost", "rows");
  for (const auto& [name, shapes] : models()) {
    for (const bool muon : {false, true}) {
      const std::vector<ParameterInfo> parameters = parameters_of(shapes, muon);
      const Plan plan = make_plan(parameters, {8}, whole(int64_t{1} << 30));
      const Imbalance i = imbalance(plan, parameters, 0);
      const double largest = largest_over_mean(parameters, 8);
      std::printf("%-11s %-5s %7.3f %7.4f %7.4f %7.3f\n", name.c_str(), muon ? "Muon" : "all",
                  largest, i.numel, i.cost, i.rows);
      if (largest > 1) {
        EXPECT_NEAR(i.numel, largest, 1e-9) << name;
        EXPECT_NEAR(i.cost, largest, 1e-9) << name;
        continue;
      }
      EXPECT_LE(i.numel, 1.05) << name;
      EXPECT_LE(i.cost, 1.05) << name;
      MemoryOptions adam;
      adam.state_bytes = [](int64_t numel, int64_t) { return 8 * numel; };
      std::vector<int64_t> bytes;
      int64_t sum = 0;
      for (int64_t rank = 0; rank < 8; ++rank) {
        const MemoryReport report = expected_memory(plan, rank, adam);
        bytes.push_back(report.master_parameters + report.optimizer_state);
        sum += bytes.back();
      }
      EXPECT_LE(8.0 * static_cast<double>(*std::max_element(bytes.begin(), bytes.end())),
                1.05 * sum);
    }
  }
}

// Buckets of two layers have 8 matrices of three sizes on 8 ranks. Owners by load alone make the
// longest row of a bucket twice the mean; swapped among equal matrices, all rows are equally long.
TEST(WholeParametersTest, EqualParametersSwapOwnersToMakeRowsEven) {
  const std::vector<ParameterInfo> parameters = parameters_of(gpt2(1024, 24), true);
  const Plan plan = make_plan(parameters, {8}, whole(int64_t{64} << 20));
  EXPECT_EQ(plan.buckets.size(), 9U);
  EXPECT_LE(imbalance(plan, parameters, 0).rows, 1.001);
  std::vector<ParameterLoad> loads;
  for (size_t p = parameters.size(); p-- > 0;) loads.push_back(load_of(parameters[p]));
  const std::vector<int64_t> owners = assign_owners(loads, 8, 1);
  int64_t longest = 0, total = 0;
  for (const Bucket& bucket : plan.buckets) {
    std::vector<int64_t> rows(8, 0);
    for (const Slot& slot : bucket.slots) {
      rows[owners[parameters.size() - 1 - slot.parameter]] += slot.numel;
      total += slot.numel;
    }
    longest += *std::max_element(rows.begin(), rows.end());
  }
  EXPECT_GE(8.0 * longest / total, 1.9) << "without the swaps";
}

TEST(WholeParametersTest, PlansOfLlama405BFor16384RanksHoldTheFilledRowsOnly) {
  const std::vector<ParameterInfo> parameters =
      parameters_of(llama(128256, 16384, 126, 53248, 1024), false);
  const Plan plan = make_plan(parameters, {16384}, whole(std::nullopt, 8));
  std::set<int64_t> machines;
  size_t filled = 0;
  for (const Bucket& bucket : plan.buckets) filled += bucket.rows.filled().size();
  for (const int64_t owner : plan.parameter_owner) machines.insert(owner / 8);
  EXPECT_LE(filled, parameters.size());
  EXPECT_EQ(machines.size(), parameters.size()) << "1137 parameters and 2048 machines";
  EXPECT_NEAR(imbalance(plan, parameters, 0).numel, largest_over_mean(parameters, 16384), 1e-6);
}

// The times of newton_schulz() in bf16 on one core of an AMD EPYC with avx512_bf16,
// libtorch 2.11.0, over that of a square of the same shorter side.
TEST(WholeParametersTest, TheCostOfNewtonSchulzIsItsMeasuredTimeWithinFivePerCent) {
  const std::map<int64_t, std::map<double, double>> time_of = {
      {384, {{1.5, 1.26}, {2, 1.55}, {2.7, 1.81}, {3, 1.96}, {4, 2.35}}},
      {768, {{1.5, 1.34}, {2, 1.54}, {2.7, 1.82}, {3, 1.98}, {4, 2.42}}}};
  for (const auto& [side, times] : time_of) {
    EXPECT_EQ(newton_schulz_cost(side, side), side * side * side);
    for (const auto& [ratio, time] : times) {
      const auto length = static_cast<int64_t>(ratio * static_cast<double>(side));
      const auto cost = static_cast<double>(newton_schulz_cost(side, length));
      EXPECT_NEAR(cost / static_cast<double>(side * side * side), time, 0.05 * time)
          << side << " x " << length;
      EXPECT_EQ(newton_schulz_cost(length, side), newton_schulz_cost(side, length));
    }
  }
}

TEST(WholeParametersTest, CostsOfNewtonSchulzThatDoNotFitAreRefused) {
  const int64_t large = int64_t{1} << 20;
  EXPECT_EQ(newton_schulz_cost(0, 10), 0);
  EXPECT_EQ(newton_schulz_cost(large, 4 * large),
            57 * ((int64_t{1} << 60) / 24) + 57 * ((int64_t{1} << 60) % 24) / 24);
  EXPECT_THROW(newton_schulz_cost(-1, 10), c10::Error);
  EXPECT_THROW(newton_schulz_cost(2 * large, 2 * large), c10::Error);
  EXPECT_THROW(newton_schulz_cost(large, 8 * large), c10::Error);
  EXPECT_THROW(newton_schulz_cost(INT64_MAX, INT64_MAX), c10::Error);
}

TEST(WholeParametersTest, ParametersOfOtherLayoutsHaveNoOwner) {
  std::vector<ParameterInfo> parameters(6, {1000, ScalarType::Float, 0});
  for (const size_t i : {1, 4}) parameters[i].layout = Layout::kWholeParameters;
  const Plan plan = make_plan(parameters, {2}, {Layout::kContiguous, 4000});
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(plan.parameter_owner[i] >= 0, parameters[i].layout.has_value()) << i;
    EXPECT_EQ(plan.arenas[plan.parameter_arena[i]].layout->id(),
              parameters[i].layout.value_or(Layout::kContiguous));
  }
  EXPECT_NE(plan.parameter_owner[1], plan.parameter_owner[4]);
  EXPECT_EQ(imbalance(plan, parameters, 0).numel, 1);
}

// One bucket has a matrix for each of the two ranks, the other one a bias for one of them.
TEST(WholeParametersTest, BucketsOfEqualRowsCount) {
  std::vector<ParameterInfo> parameters(3, {1008, ScalarType::Float, 0});
  parameters[0].numel = 16;
  const Imbalance i = imbalance(make_plan(parameters, {2}, whole(8064)), parameters, 0);
  EXPECT_NEAR(i.numel, 1024 * 2 / 2032.0, 1e-9);
  EXPECT_NEAR(i.cost, 1024 * 2 / 2032.0, 1e-9);
  EXPECT_NEAR(i.rows, 1024 * 2 / 2032.0, 1e-9);
}

TEST(WholeParametersTest, OtherPlansHaveNoOwners) {
  const std::vector<ParameterInfo> parameters = {{10, ScalarType::Float, 0}};
  const Plan plan = make_plan(parameters, {2}, {Layout::kContiguous});
  EXPECT_TRUE(plan.parameter_owner.empty());
}

}  // namespace
}  // namespace zero
