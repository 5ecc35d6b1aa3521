// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/grad_norm.h without an optimizer: meshes whose ranks hold different things, what is sent,
// and what is refused.
#include "zero/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/norm/norm_on_mesh.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/mesh.h"

namespace zero {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor ones(at::IntArrayRef shape) { return parameter(at::ones(shape)); }

TEST(GradNormTest, ReplicatedStageShardedStageAndEmptyStages) {
  on_mesh({{"pp", 4}, {"ep", 2}}, [](const Mesh& mesh) {
    std::vector<NormParameter> parameters;
    if (mesh.coordinate("pp") == 0) {
      parameters.push_back({ones({8, 8}), Placement().replicated_over({mesh.group({"ep"})})});
    } else if (mesh.coordinate("pp") == 1) {
      parameters.push_back(
          {ones({8, 8}), Placement().sharded_over({mesh.group({"ep"})}).expert(true)});
    }
    const auto groups = group_parameters_for_norm(parameters);
    const at::Tensor norm = clip_grad_norm_(groups, 1.0, 2.0, mesh.group({"pp"}));
    EXPECT_EQ(norm.dim(), 0);
    EXPECT_EQ(norm.scalar_type(), at::kDouble);
    EXPECT_DOUBLE_EQ(norm.item<double>(), std::sqrt(192.0));
    for (const NormParameter& p : parameters) {
      EXPECT_FLOAT_EQ(p.tensor.grad().max().item<float>(), 0.0721688F);
      EXPECT_FLOAT_EQ(p.tensor.grad().min().item<float>(), 0.0721688F);
    }
  });
}

TEST(GradNormTest, CoefficientAndUntouchedBits) {
  const at::Tensor p = parameter(at::tensor({6.0, 8.0}, at::kDouble));
  const auto groups = group_parameters_for_norm({{p, {}}});
  EXPECT_EQ(clip_grad_norm_(groups, 1.0).item<double>(), 10.0);
  EXPECT_DOUBLE_EQ(p.grad()[0].item<double>(), 6.0 / (10.0 + 1e-6));
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const at::Tensor before = random_tensor({1000}, 3).to(dtype);
    const at::Tensor q = parameter(before.clone());
    const auto group = group_parameters_for_norm({{q, {}}});
    const double norm = clip_grad_norm_(group, std::nullopt).item<double>();
    clip_grad_norm_(group, norm + 1e-5);
    EXPECT_TRUE(at::equal(q.grad(), before)) << dtype;
    clip_grad_norm_(group, norm / 2);
    EXPECT_FALSE(at::equal(q.grad(), before)) << dtype;
  }
}

TEST(GradNormTest, AParameterOfTwoStagesCountsOnceAndIsClippedOnBoth) {
  on_mesh({{"pp", 2}, {"tp", 2}}, [](const Mesh& mesh) {
    const bool first = mesh.coordinate("pp") == 0;
    const at::Tensor shared = ones({9});
    const auto groups = group_parameters_for_norm(
        {{shared, Placement().sharded_over({mesh.group({"tp"})}).owner(first)}});
    const at::Tensor norm = clip_grad_norm_(groups, 1.0, 2.0, mesh.group({"pp"}));
    EXPECT_DOUBLE_EQ(norm.item<double>(), std::sqrt(18.0));
    EXPECT_NEAR(shared.grad()[0].item<float>(), 1 / (std::sqrt(18.0) + 1e-6), 1e-7);
  });
}

TEST(GradNormTest, RanksWithoutGradientsOrParametersTakePart) {
  on_mesh({{"ep", 4}}, [](const Mesh& mesh) {
    const Group ep = mesh.group({"ep"});
    const Placement placement = Placement().sharded_over({ep}).expert(true);
    // Rank 0 has a gradient, rank 1 an empty part, rank 2 no gradient, rank 3 no parameter.
    at::Tensor mine;
    if (mesh.all().rank() == 0) mine = ones({16});
    if (mesh.all().rank() == 1) mine = parameter(at::empty({0}));
    if (mesh.all().rank() == 2) mine = at::zeros({5});
    const auto groups = group_parameters_for_norm({{mine, placement}});
    for (const double p : {1.0, 2.0, kInfinity}) {
      const double expected = std::isinf(p) ? 1.0 : std::pow(16.0, 1.0 / p);
      EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, std::nullopt, p).item<double>(), expected);
    }
    clip_grad_norm_(groups, 0.5);
    EXPECT_FALSE(mesh.all().rank() == 2 && mine.grad().defined());
    if (mesh.all().rank() == 0) mine.mutable_grad().reset();
    for (const double p : {2.0, kInfinity}) {
      EXPECT_EQ(clip_grad_norm_(groups, 1.0, p).item<double>(), 0.0);
    }
    // A gradient that comes later, and in another dtype, needs no new groups.
    if (mesh.all().rank() == 2) mine.mutable_grad() = at::full({5}, 2.0);
    EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, std::nullopt).item<double>(), std::sqrt(20.0));
  });
  EXPECT_EQ(clip_grad_norm_({}, 1.0).item<double>(), 0.0);
}

TEST(GradNormTest, DtypesMayDifferBetweenRanks) {
  on_mesh({{"tp", 4}}, [](const Mesh& mesh) {
    const std::vector<c10::ScalarType> dtypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
    const at::Tensor g = at::full({6}, 0.5, at::kDouble).to(dtypes[mesh.all().rank()]);
    const auto groups =
        group_parameters_for_norm({{parameter(g), Placement().sharded_over({mesh.group({"tp"})})}});
    EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, std::nullopt).item<double>(), std::sqrt(6.0));
    EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, std::nullopt, 1.0).item<double>(), 12.0);
    EXPECT_EQ(clip_grad_norm_(groups, std::nullopt, kInfinity).item<double>(), 0.5);
  });
}

TEST(GradNormTest, NanAndInfinityReachEveryRank) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    on_mesh({{"pp", 2}, {"dp_shard", 2}}, [&](const Mesh& mesh) {
      const auto norm = [&](double bad, double p) {
        at::Tensor g = random_tensor({300}, 5).to(dtype);
        if (mesh.all().rank() == 3) g[17].fill_(bad);
        const auto groups = group_parameters_for_norm(
            {{parameter(g), Placement().sharded_over({mesh.group({"dp_shard"})})}});
        return clip_grad_norm_(groups, std::nullopt, p, mesh.group({"pp"})).item<double>();
      };
      for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
        EXPECT_TRUE(std::isnan(norm(kNan, p))) << dtype << " " << p;
        EXPECT_TRUE(std::isnan(norm(-kNan, p))) << dtype << " " << p;
        EXPECT_EQ(norm(-kInfinity, p), kInfinity) << dtype << " " << p;
      }
      EXPECT_EQ(norm(-7.0, kInfinity), 7.0);
    });
  }
}

// Squares that leave the range of the gradient's own dtype, in both directions.
TEST(GradNormTest, LargeAndTinyGradientsHaveTheirNorms) {
  const auto norm = [](double value, c10::ScalarType dtype) {
    const at::Tensor g = at::full({100}, value, at::kDouble).to(dtype);
    const double exact = 10 * g[0].item<double>();
    const auto groups = group_parameters_for_norm({{parameter(g), {}}});
    return clip_grad_norm_(groups, std::nullopt).item<double>() / exact;
  };
  EXPECT_NEAR(norm(1e19, at::kFloat), 1, 1e-14);
  EXPECT_NEAR(norm(1e-30, at::kFloat), 1, 1e-14);
  EXPECT_NEAR(norm(300, at::kHalf), 1, 1e-14);
  EXPECT_NEAR(norm(1e-4, at::kHalf), 1, 1e-14);
  EXPECT_NEAR(norm(3e38, at::kBFloat16), 1, 1e-14);
}

// The factory counts: two calls make no more process groups than one, and new groups of parameters
// find the old communicators.
TEST(GradNormTest, NoProcessGroupIsMadePerCall) {
  const auto network = std::make_shared<MemoryNetwork>();
  std::atomic<int> made{0};
  RunOptions options;
  options.network = network;
  run_ranks(
      4,
      [&](const Group& job) {
        const BackendFactory factory = network->factory(job.rank());
        const Group world(
            job.store(), job.rank(), job.world_size(), "counted",
            [&, factory](auto&&... arguments) {
              ++made;
              return factory(std::forward<decltype(arguments)>(arguments)...);
            },
            at::kCPU, job.timeout());
        const Mesh mesh(world, {{"pp", 2}, {"tp", 2}});
        for (int call = 0; call < 3; ++call) {
          const auto groups = group_parameters_for_norm(
              {{ones({3}), Placement().sharded_over({mesh.group({"tp"})})}});
          clip_grad_norm_(groups, 1.0, call % 2 ? kInfinity : 2.0, mesh.group({"pp"}));
        }
        EXPECT_EQ(messages(mesh.group({"tp"})), 3);
        EXPECT_EQ(messages(mesh.group({"pp"})), 3);
      },
      options);
  EXPECT_EQ(made, 2 * 4);  // tensor and pipeline group of every rank, once
}

TEST(GradNormTest, AListOfGroupsIsReducedOneAfterTheOther) {
  on_mesh({{"dp_shard", 2}, {"tp", 2}}, [](const Mesh& mesh) {
    const Group dp = mesh.group({"dp_shard"}), tp = mesh.group({"tp"});
    const auto groups = group_parameters_for_norm(
        {{ones({4}), Placement().sharded_over({dp, tp})},
         {ones({4}), Placement().sharded_over({tp, dp})},
         {ones({4}), Placement().sharded_over({tp}).replicated_over({dp})}});
    EXPECT_EQ(groups.size(), 2u);
    EXPECT_DOUBLE_EQ(clip_grad_norm_(groups, std::nullopt).item<double>(), std::sqrt(40.0));
    EXPECT_EQ(messages(dp), 1);
    EXPECT_EQ(messages(tp), 2);  // {dp, tp} and {tp} are two sets
  });
}

TEST(GradNormTest, GroupsComeByReductionKindOwnerAndDtype) {
  on_mesh({{"tp", 2}}, [](const Mesh& mesh) {
    const Group tp = mesh.group({"tp"});
    const at::Tensor half = parameter(at::ones({2}, at::kHalf));
    const auto groups = group_parameters_for_norm({{ones({1}), {}},
                                                   {ones({2}), Placement().sharded_over({tp})},
                                                   {half, Placement().sharded_over({tp})},
                                                   {ones({3}), Placement().sharded_over({tp})},
                                                   {ones({4}), {}}});
    ASSERT_EQ(groups.size(), 3u);
    EXPECT_EQ(groups[0].sharded_over.size(), 1u) << "sharded groups come first";
    EXPECT_EQ(groups[2].sharded_over.size(), 0u);
    EXPECT_EQ(groups[2].parameters.size(), 2u);
    clip_grad_norm_(groups, std::nullopt);
    EXPECT_EQ(messages(tp), 1) << "two dtypes, one message";
  });
}

TEST(GradNormTest, MisuseIsRefused) {
  const at::Tensor p = ones({2});
  const auto groups = group_parameters_for_norm({{p, {}}});
  EXPECT_THROW(clip_grad_norm_(groups, 0.0), c10::Error);
  EXPECT_THROW(clip_grad_norm_(groups, kNan), c10::Error);
  EXPECT_THROW(clip_grad_norm_(groups, 1.0, 0.0), c10::Error);
  EXPECT_THROW(clip_grad_norm_(groups, 1.0, kNan), c10::Error);
  EXPECT_THROW(group_parameters_for_norm({{p, {}}, {p, {}}}), c10::Error);
  EXPECT_THROW(group_parameters_for_norm({{at::zeros({2}, at::kLong), {}}}), c10::Error);
  const Mesh mesh(simulated_group(4), {{"dp", 2}, {"tp", 2}});
  const Group both = mesh.group({"dp", "tp"}), tp = mesh.group({"tp"});
  EXPECT_THROW(group_parameters_for_norm({{p, Placement().sharded_over({both, tp})}}), c10::Error);
  EXPECT_THROW(
      group_parameters_for_norm({{p, Placement().sharded_over({both}).replicated_over({tp})}}),
      c10::Error);
  at::Tensor sparse = at::zeros({2, 2});
  sparse.mutable_grad() = at::ones({2, 2}).to_sparse();
  EXPECT_THROW(clip_grad_norm_(group_parameters_for_norm({{sparse, {}}}), 1.0), c10::Error);
}

}  // namespace
}  // namespace zero
