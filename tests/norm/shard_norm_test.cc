// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/shard_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/exact_sum.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const std::vector<double> kOnce{1};

SegmentTensors segment(const at::Tensor& gradient, int64_t group = 0) {
  SegmentTensors result;
  result.segment.numel = gradient.numel();
  result.group = group;
  result.gradient = gradient;
  return result;
}

struct Numbers {
  double norm, nonfinite;
};

Numbers norm_of_ranks(Communicator& group, const std::vector<SegmentTensors>& segments,
                      const std::vector<double>& weights, double norm_type) {
  const ShardNorm result = shard_norm(segments, weights, norm_type, at::kCPU, group);
  EXPECT_EQ(result.norm.scalar_type(), at::kDouble);
  EXPECT_EQ(result.norm.dim() + result.nonfinite.dim(), 0);
  return {result.norm.item<double>(), result.nonfinite.item<double>()};
}

void on_ranks(int world_size, const std::function<void(Communicator&)>& body) {
  run_ranks(world_size,
            [&](const Group& group) { body(*group.make_communicator("norm", Purpose::kData)); });
}

TEST(ShardNormTest, IsTorchsNormOfAllShardsTogether) {
  for (const int world_size : {1, 2, 3, 4}) {
    // Rank r has r pieces, the first none.
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world_size; ++rank) {
      for (int i = 0; i < rank; ++i) all.push_back(random_tensor({7 + 4 * i}, 10 * rank + i));
    }
    if (all.empty()) all.push_back(at::zeros({1}));
    const at::Tensor whole = at::cat(all).to(at::kDouble);
    on_ranks(world_size, [&](Communicator& group) {
      std::vector<SegmentTensors> segments;
      for (int i = 0; i < group.rank(); ++i) {
        segments.push_back(segment(random_tensor({7 + 4 * i}, 10 * group.rank() + i)));
      }
      for (const double norm_type : {1.0, 2.0, 3.5, kInfinity}) {
        const Numbers got = norm_of_ranks(group, segments, kOnce, norm_type);
        EXPECT_NEAR(got.norm, at::linalg_vector_norm(whole, norm_type).item<double>(), 1e-6);
        EXPECT_EQ(got.nonfinite, 0);
      }
    });
  }
}

TEST(ShardNormTest, WeightsCountWhatSeveralRanksHoldOnce) {
  on_ranks(2, [](Communicator& group) {
    const std::vector<SegmentTensors> segments{
        segment(at::full({1}, 3.0), 0),   // both ranks hold it
        segment(at::full({1}, 4.0), 1),   // counted by neither
        segment(at::full({1}, 6.0), 2)};  // of each rank
    // 3^2 + 2 * 6^2
    const Numbers got = norm_of_ranks(group, segments, {0.5, 0, 1}, 2);
    EXPECT_NEAR(got.norm, 9, 1e-12);
    EXPECT_NEAR(norm_of_ranks(group, segments, {0.5, 0, 1}, 1).norm, 15, 1e-12);
    EXPECT_EQ(norm_of_ranks(group, segments, {0.5, 0, 1}, kInfinity).norm, 6);
  });
}

// Each operation of libtorch takes a microsecond, and on a GPU a launch.
TEST(ShardNormTest, ManyGroupsOfOneWeightTakeNoMoreOperationsThanOne) {
  on_ranks(1, [](Communicator& group) {
    constexpr int64_t kGroups = 100;
    static int operations;
    const auto count = [&](const std::vector<SegmentTensors>& segments,
                           const std::vector<double>& weights, const at::Tensor& bound) {
      operations = 0;
      const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
          [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
            ++operations;
            return nullptr;
          }));
      const ShardNorm result = shard_norm(segments, weights, 2.0, at::kCPU, group, bound);
      at::removeCallback(handle);
      return std::pair{operations, result.norm.item<double>()};
    };
    for (const at::Tensor& bound : {at::Tensor(), at::full({}, 0.75)}) {
      std::vector<SegmentTensors> one, many;
      for (int64_t g = 0; g < kGroups; ++g) {
        one.push_back(segment(random_tensor({5}, static_cast<int>(g))));
        many.push_back(segment(one.back().gradient, g));
      }
      const auto expected = count(one, {0.5}, bound);
      EXPECT_GT(expected.first, 0);
      EXPECT_EQ(count(many, std::vector<double>(kGroups, 0.5), bound), expected);
    }
  });
}

TEST(ShardNormTest, WhatIsNotFiniteOnOneRankIsSeenByAll) {
  for (const double bad : {kInfinity, -kInfinity, kNan}) {
    for (const double norm_type : {1.0, 2.0, 3.5, kInfinity}) {
      for (const double weight : {1.0, 0.0}) {
        on_ranks(3, [&](Communicator& group) {
          at::Tensor gradient = at::ones({5});
          if (group.rank() == 2) gradient[3] = bad;
          const Numbers got = norm_of_ranks(group, {segment(gradient)}, {weight}, norm_type);
          EXPECT_NE(got.nonfinite, 0);
          if (weight == 0 && norm_type != kInfinity) return;
          EXPECT_FALSE(std::isfinite(got.norm));
          EXPECT_EQ(std::isnan(got.norm), std::isnan(bad));
        });
      }
    }
  }
}

// The largest float to the 30th power is beyond a double.
TEST(ShardNormTest, ANormThatOverflowsIsNoNonfiniteGradient) {
  on_ranks(2, [](Communicator& group) {
    const std::vector<SegmentTensors> segments{
        segment(at::full({2}, std::numeric_limits<float>::max()))};
    const Numbers got = norm_of_ranks(group, segments, kOnce, 30);
    EXPECT_TRUE(std::isinf(got.norm));
    EXPECT_EQ(got.nonfinite, 0);
    EXPECT_TRUE(std::isfinite(norm_of_ranks(group, segments, kOnce, 2).norm));
  });
}

// ---------------------------------------------------------------------
// exact_shard_norm()

Numbers exact_norm(Communicator& group, const std::vector<SegmentTensors>& segments,
                   double norm_type, const at::Tensor& bound = {}) {
  const ShardNorm result = exact_shard_norm(segments, norm_type, at::kCPU, group, bound);
  EXPECT_EQ(result.norm.scalar_type(), at::kDouble);
  EXPECT_EQ(result.norm.dim() + result.nonfinite.dim(), 0);
  return {result.norm.item<double>(), result.nonfinite.item<double>()};
}

TEST(ShardNormTest, AnExactNormHasTheSameBitsHoweverBlocksAreSpreadOverRanks) {
  constexpr int64_t kBlocks = 9;
  const at::Tensor all = random_tensor({kBlocks * kernels::kExactBlock - 5}, 1) *
                         random_tensor({kBlocks * kernels::kExactBlock - 5}, 2).exp();
  for (const at::Tensor& bound : {at::Tensor(), at::full({}, 0.75)}) {
    const at::Tensor values = (bound.defined() ? all.clamp(-bound, bound) : all).to(at::kDouble);
    for (const double norm_type : {2.0, kInfinity}) {
      double one = 0;
      for (const int world_size : {1, 2, 3, 4}) {
        on_ranks(world_size, [&](Communicator& group) {
          std::vector<SegmentTensors> segments;
          for (int64_t b = kBlocks - 1 - group.rank(); b >= 0; b -= world_size) {
            const int64_t begin = b * kernels::kExactBlock;
            const int64_t end = std::min(begin + kernels::kExactBlock, all.numel());
            segments.push_back(segment(all.slice(0, begin, end), b % 2));
          }
          const Numbers got = exact_norm(group, segments, norm_type, bound);
          EXPECT_EQ(got.nonfinite, 0);
          if (world_size > 1) {
            EXPECT_EQ(got.norm, one) << world_size;
          } else {
            one = got.norm;
          }
        });
      }
      const auto expected = at::linalg_vector_norm(values, norm_type).item<double>();
      EXPECT_NEAR(one, expected, 1e-12 * expected);
    }
  }
}

TEST(ShardNormTest, WhatIsNotFiniteInAnExactNormIsSeenByAll) {
  for (const double bad : {kInfinity, -kInfinity, kNan}) {
    for (const double norm_type : {2.0, kInfinity}) {
      on_ranks(3, [&](Communicator& group) {
        at::Tensor gradient = at::ones({5});
        if (group.rank() == 2) gradient[3] = bad;
        const Numbers got = exact_norm(group, {segment(gradient)}, norm_type);
        EXPECT_NE(got.nonfinite, 0);
        EXPECT_FALSE(std::isfinite(got.norm));
        EXPECT_EQ(std::isnan(got.norm), std::isnan(bad));
      });
    }
  }
}

TEST(ShardNormTest, SendsOneSmallMessage) {
  on_ranks(2, [](Communicator& group) {
    const Traffic before = group.traffic();
    shard_norm({segment(at::ones({1000}))}, {1}, 2, at::kCPU, group);
    const Traffic after = group.traffic();
    EXPECT_EQ(after.small_calls - before.small_calls, 1);
    EXPECT_EQ(after.exchange_calls + after.gather_calls, 0);
    EXPECT_LE(after.small_bytes_sent - before.small_bytes_sent, 16);
  });
}

}  // namespace
}  // namespace zero
