// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// sum_tree against plain loops: equal bits in every setting.
#include "kernels/sum_tree.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/kernels/reference.h"
#include "tests/kernels/test_buffers.h"
#include "tests/support/error_of.h"

namespace zero::kernels {
namespace {

using c10::ScalarType;

// ((0 + 1) + 2) + ((3 + 4) + 5) with the places of a stack.
const std::vector<RowAddition> kSix = {{0, 1, 0}, {0, 2, 0}, {3, 4, 1}, {3, 5, 1}, {0, 3, 0}};
// 0 + (1 + (2 + 3)): a row that is not a sum meets one that is.
const std::vector<RowAddition> kRight = {{2, 3, 2}, {1, 2, 1}, {0, 1, 0}};
const std::vector<RowAddition> kPair = {{0, 1, 0}};

// Plain loops over whole rows.
void expected_sum(const SumTreeArgs& args, const std::vector<std::vector<float>>& rows,
                  float* shard) {
  std::vector<std::vector<float>> values = rows;
  for (const RowAddition& a : args.additions) {
    for (int64_t i = 0; i < args.numel; ++i) {
      values[a.into][i] = values[a.into][i] + values[a.from][i];
    }
  }
  for (int64_t i = 0; i < args.numel; ++i) {
    const volatile float product = args.scale * values[0][i];
    shard[i] = args.accumulate ? shard[i] + product : product;
  }
}

TEST(SumTree, EveryOrderTypeAndSettingMatchesPlainLoops) {
  const std::vector<std::vector<RowAddition>> orders = {{}, kPair, kRight, kSix};
  for (const ScalarType dtype : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}) {
    for (const auto& order : orders) {
      for (const int64_t numel : kSizes) {
        std::vector<Buffer> rows;
        std::vector<std::vector<float>> values;
        std::vector<const void*> addresses;
        for (size_t r = 0; r <= order.size(); ++r) {
          values.emplace_back(numel);
          fill_ordinary(values[r].data(), numel, static_cast<int>(r) + 3, 300.0F);
          rows.emplace_back(numel * size_of(dtype), size_of(dtype));
          reference::cast_copy(values[r].data(), ScalarType::Float, rows[r].as<void>(), dtype,
                               numel, nullptr);
          reference::cast_copy(rows[r].as<void>(), dtype, values[r].data(), ScalarType::Float,
                               numel, nullptr);
        }
        for (Buffer& row : rows) addresses.push_back(row.as<void>());
        SumTreeArgs args;
        args.rows = addresses;
        args.additions = order;
        args.places = 3;
        args.numel = numel;
        args.dtype = dtype;
        args.scale = 1.0F / 3;
        for (const bool accumulate : {false, true}) {
          args.accumulate = accumulate;
          Buffer start(4 * numel, 4);
          fill_ordinary(start.as<float>(), numel, 6);
          Buffer expected = start;
          expected_sum(args, values, expected.as<float>());
          for_each_setting([&] {
            Buffer got = start;
            args.shard = got.as<float>();
            sum_tree(args, Stream{});
            ASSERT_TRUE(got.same_bytes(expected))
                << c10::toString(dtype) << ", " << order.size() << " additions of " << numel;
            ASSERT_TRUE(got.guards_intact());
          });
        }
      }
    }
  }
}

TEST(SumTree, TheOrderIsTheCallers) {
  const float values[4] = {1e8F, 1.0F, -1e8F, 1.0F};
  const std::vector<const void*> rows = {&values[0], &values[1], &values[2], &values[3]};
  float sum = 0;
  SumTreeArgs args;
  args.rows = rows;
  args.places = 3;
  args.numel = 1;
  args.shard = &sum;
  const std::vector<RowAddition> pairs = {{0, 1, 0}, {2, 3, 1}, {0, 2, 0}};
  args.additions = pairs;
  sum_tree(args, Stream{});
  EXPECT_EQ(sum, 0.0F);
  const std::vector<RowAddition> far = {{0, 2, 0}, {1, 3, 1}, {0, 1, 0}};
  args.additions = far;
  sum_tree(args, Stream{});
  EXPECT_EQ(sum, 2.0F);
}

TEST(SumTree, OneRowMayBeTheShard) {
  std::vector<float> values = {1.0F, 2.0F, 3.0F};
  const std::vector<const void*> rows = {values.data()};
  SumTreeArgs args;
  args.rows = rows;
  args.numel = 3;
  args.scale = 2.0F;
  args.shard = values.data();
  sum_tree(args, Stream{});
  EXPECT_EQ(values, (std::vector<float>{2.0F, 4.0F, 6.0F}));
}

TEST(SumTree, WrongArgumentsAreRefused) {
  float values[2] = {1, 2};
  const std::vector<const void*> rows = {&values[0], &values[1]};
  float sum = 0;
  SumTreeArgs args;
  args.rows = rows;
  args.places = 1;
  args.numel = 1;
  args.shard = &sum;
  const auto error = [&](std::vector<RowAddition> additions) {
    args.additions = additions;
    return error_of([&] { sum_tree(args, Stream{}); });
  };
  EXPECT_NE(error({}).find("one addition less than rows"), std::string::npos);
  EXPECT_NE(error({{0, 2, 0}}).find("0 += 2"), std::string::npos);
  EXPECT_NE(error({{1, 0, 0}}).find("1 += 0"), std::string::npos);
  EXPECT_NE(error({{0, 1, 1}}).find("a place below 1"), std::string::npos);
  args.dtype = ScalarType::Double;
  EXPECT_NE(error({{0, 1, 0}}).find("dtype"), std::string::npos);
  args.dtype = ScalarType::Float;
  args.shard = nullptr;
  EXPECT_NE(error({{0, 1, 0}}).find("null pointer"), std::string::npos);
}

}  // namespace
}  // namespace zero::kernels
