// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/reshard.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace zero {
namespace {

TEST(ReshardTest, EveryWantedElementComesFromItsPlace) {
  std::mt19937 random(6);
  const auto cut_up = [&](int64_t parameter, int64_t numel, std::vector<ParameterRange>& out) {
    for (int64_t at = 0; at < numel;) {
      const int64_t part = std::min<int64_t>(numel - at, 1 + random() % 7);
      out.push_back({parameter, at, part});
      at += part;
    }
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<ParameterRange> stored, wanted;
    for (int64_t p = 0; p < 3; ++p) {
      const int64_t numel = random() % 40;
      cut_up(p, numel, stored);
      cut_up(p, numel, wanted);
    }
    std::shuffle(stored.begin(), stored.end(), random);
    std::shuffle(wanted.begin(), wanted.end(), random);
    std::vector<std::vector<int>> filled(wanted.size());
    for (size_t w = 0; w < wanted.size(); ++w) filled[w].resize(wanted[w].numel);
    int64_t last = -1;
    for (const RangeOverlap& overlap : reshard(stored, wanted)) {
      EXPECT_GE(overlap.stored, last) << "each stored range is read once";
      last = overlap.stored;
      for (int64_t i = 0; i < overlap.numel; ++i) {
        ++filled[overlap.wanted].at(overlap.wanted_begin + i);
        EXPECT_EQ(stored[overlap.stored].parameter, wanted[overlap.wanted].parameter);
        EXPECT_EQ(stored[overlap.stored].begin + overlap.stored_begin,
                  wanted[overlap.wanted].begin + overlap.wanted_begin);
        EXPECT_LE(overlap.stored_begin + overlap.numel, stored[overlap.stored].numel);
      }
    }
    for (const auto& counts : filled) {
      for (int count : counts) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ReshardTest, HolesAndOverlapsAreRefused) {
  EXPECT_THROW(reshard({{0, 0, 4}}, {{0, 2, 4}}), c10::Error);
  EXPECT_THROW(reshard({{0, 0, 4}, {0, 5, 4}}, {{0, 2, 4}}), c10::Error);
  EXPECT_THROW(reshard({{0, 0, 4}, {0, 3, 4}}, {{0, 0, 1}}), c10::Error);
  EXPECT_THROW(reshard({{0, 0, 4}}, {{1, 0, 1}}), c10::Error);
}

}  // namespace
}  // namespace zero
