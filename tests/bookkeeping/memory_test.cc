// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/memory.h"

#include <c10/core/ScalarType.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "bookkeeping/plan.h"

namespace zero {
namespace {

using c10::ScalarType;

// The formulas of the paper, with the gradient shard in fp32: for P parameters
// that need no padding, W ranks and Adam.
TEST(MemoryTest, MatchesTheFormulas) {
  const int64_t p = 64 * 64 * 60;
  const auto adam = [](int64_t numel, int64_t) { return 8 * numel; };
  for (int64_t w : {1, 2, 3, 4, 5}) {
    const auto expect = [&](ScalarType dtype, int64_t stage, int64_t bytes) {
      const Plan plan = make_plan({{p, dtype, 0}}, {w}, {});
      int64_t total = 0;
      for (int64_t rank = 0; rank < w; ++rank) {
        total += expected_memory(plan, rank, {stage, adam}).total();
      }
      EXPECT_EQ(total, bytes) << "W " << w << " stage " << stage;
    };
    // Summed over ranks: w times what is full, once what is sharded.
    expect(ScalarType::BFloat16, 2, w * 2 * p + 4 * p + 12 * p);
    expect(ScalarType::BFloat16, 1, w * (2 + 2) * p + 4 * p + 12 * p);
    expect(ScalarType::Float, 2, w * 4 * p + 4 * p + 8 * p);
    expect(ScalarType::Float, 1, w * (4 + 4) * p + 4 * p + 8 * p);
  }
}

// A parameter is small or not as a whole, however small its segments are.
TEST(MemoryTest, AveragesOfSmallParametersAreInFp32) {
  ParameterInfo small{4095, ScalarType::Float, 0}, large{4096, ScalarType::Float, 0};
  small.block = large.block = kMomentBlock;
  for (int64_t w : {1, 2, 3}) {
    const Plan plan = make_plan({small, large}, {w}, {});
    int64_t bytes = 0;
    for (int64_t rank = 0; rank < w; ++rank) {
      MemoryOptions options;
      options.state_bytes = adam_state_bytes(Moments::kInt8);
      bytes += expected_memory(plan, rank, options).optimizer_state;
    }
    EXPECT_EQ(bytes, 2 * (4 * 4095 + 4096 + 4 * 4096 / 256)) << "W " << w;
  }
}

}  // namespace
}  // namespace zero
