// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/norm/norm_accumulator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/random_tensors.h"
#include "tests/support/run_ranks.h"

namespace zero {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kTypes[] = {1, 2, 2.5, kInfinity};

// By torch, in double.
double plain_norm(const Tensors& gradients, double norm_type) {
  Tensors flat;
  for (const at::Tensor& g : gradients) flat.push_back(g.to(at::kDouble).reshape({-1}));
  return at::linalg_vector_norm(at::cat(flat), norm_type).item<double>();
}

double norm_by_parts(const Tensors& gradients, double norm_type) {
  const at::Tensor part = empty_norm_parts(1, norm_type, at::kCPU).select(0, 0);
  add_to_norm_part(part, gradients, norm_type);
  return norm_of(part, norm_type).item<double>();
}

TEST(NormAccumulatorTest, EveryDtypeAndMemoryOrderCountsAsTorchCountsIt) {
  for (const double norm_type : kTypes) {
    Tensors all;
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const at::Tensor wide = random_tensor({8, 6}, all.size()).to(dtype);
      all.insert(all.end(), {wide, wide.t(), wide.select(1, 3), wide.slice(0, 0, 8, 3),
                             at::zeros({0}, dtype)});
      EXPECT_NEAR(norm_by_parts({wide, wide.select(1, 3)}, norm_type),
                  plain_norm({wide, wide.select(1, 3)}, norm_type), 1e-7);
    }
    EXPECT_NEAR(norm_by_parts(all, norm_type), plain_norm(all, norm_type), 1e-6);
    EXPECT_EQ(norm_by_parts({}, norm_type), 0);
  }
}

// More 16-bit values than are widened at a time.
TEST(NormAccumulatorTest, ManyValuesOf16BitsAreAllCounted) {
  const Tensors gradients{at::full({(1 << 18) - 5}, 2.0, at::kBFloat16),
                          at::full({(1 << 18) + 8}, 2.0, at::kHalf)};
  EXPECT_DOUBLE_EQ(norm_by_parts(gradients, 1), 2.0 * ((1 << 19) + 3));
  const Tensors doubles{at::full({(1 << 18) + 8}, 2.0, at::kDouble)};
  EXPECT_DOUBLE_EQ(norm_by_parts(doubles, 1), 2.0 * ((1 << 18) + 8));
}

TEST(NormAccumulatorTest, AWeightMultipliesTheSumAndZeroOnlyCounts) {
  const at::Tensor values = at::full({3}, 2.0), bad = at::full({1}, kNan);
  const at::Tensor part = empty_norm_parts(1, 2, at::kCPU).select(0, 0);
  const auto add = [&](const at::Tensor& tensor, double weight) {
    const std::vector<kernels::ConstSpan> spans{{tensor.const_data_ptr<float>(), tensor.numel()}};
    add_to_norm_part(part, spans, 2, weight);
  };
  add(values, 0.25);
  EXPECT_DOUBLE_EQ(norm_of(part, 2).item<double>(), std::sqrt(3.0));
  add(values, 0);
  add(bad, 0);
  EXPECT_DOUBLE_EQ(norm_of(part, 2).item<double>(), std::sqrt(3.0));
  EXPECT_EQ(part[1].item<double>(), 1);
  add(bad, 1);
  EXPECT_TRUE(std::isnan(norm_of(part, 2).item<double>()));
  EXPECT_EQ(part[1].item<double>(), 2);
}

TEST(NormAccumulatorTest, AMaximumNeverLosesNanOrInfinity) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const auto largest = [&](const std::vector<double>& list) {
      Tensors gradients;
      for (const double value : list) gradients.push_back(at::full({2}, value).to(dtype));
      return norm_by_parts(gradients, kInfinity);
    };
    EXPECT_EQ(largest({1, -3, 2}), 3);
    EXPECT_EQ(largest({1, -kInfinity, 2}), kInfinity);
    for (const double nan : {kNan, -kNan}) {
      EXPECT_TRUE(std::isnan(largest({kInfinity, nan, 2}))) << dtype;
      EXPECT_TRUE(std::isnan(largest({nan, kInfinity, 2}))) << dtype;
    }
  }
}

TEST(NormAccumulatorTest, PartsAreCombinedHereAndOverRanks) {
  for (const double norm_type : kTypes) {
    for (const int world_size : {1, 2, 3, 4}) {
      Tensors all;
      for (int r = 0; r < world_size; ++r) {
        all.insert(all.end(), {random_tensor({5}, 2 * r), random_tensor({9}, 2 * r + 1)});
      }
      run_ranks(world_size, [&](const Group& group) {
        const auto communicator = group.make_communicator("norm", Purpose::kData);
        const at::Tensor parts = empty_norm_parts(2, norm_type, at::kCPU);
        for (int i : {0, 1}) {
          add_to_norm_part(parts.select(0, i), {all[2 * group.rank() + i]}, norm_type);
        }
        all_reduce_norm_parts(parts, *communicator, "norm").wait();
        EXPECT_NEAR(norm_of(combine_norm_parts(parts), norm_type).item<double>(),
                    plain_norm(all, norm_type), 1e-7);
      });
    }
  }
}

TEST(NormAccumulatorTest, SparseAndComplexGradientsAreRefused) {
  for (const at::Tensor& gradient :
       {at::ones({2, 2}).to_sparse(), at::ones({2}, at::kComplexFloat), at::ones({2}, at::kLong)}) {
    expect_words(error_of([&] { norm_by_parts({gradient}, 2); }),
                 {"gradient norm: expected dense gradients of a real floating dtype"});
  }
}

}  // namespace
}  // namespace zero
