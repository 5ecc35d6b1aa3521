// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "bookkeeping/reshard.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>

namespace zero {
namespace {

// Stored ranges by parameter and place, so that a wanted range meets a run of them.
std::vector<int64_t> sorted_numbers(c10::ArrayRef<ParameterRange> stored) {
  std::vector<int64_t> order;
  for (size_t i = 0; i < stored.size(); ++i) {
    if (stored[i].numel > 0) order.push_back(static_cast<int64_t>(i));
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::tie(stored[a].parameter, stored[a].begin) <
           std::tie(stored[b].parameter, stored[b].begin);
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const ParameterRange& a = stored[order[i - 1]];
    const ParameterRange& b = stored[order[i]];
    TORCH_CHECK(a.parameter != b.parameter || a.begin + a.numel <= b.begin, "parameter ",
                b.parameter, ": expected every element in one stored range, got element ", b.begin,
                " in two");
  }
  return order;
}

}  // namespace

std::vector<RangeOverlap> reshard(c10::ArrayRef<ParameterRange> stored,
                                  c10::ArrayRef<ParameterRange> wanted) {
  const std::vector<int64_t> order = sorted_numbers(stored);
  std::vector<RangeOverlap> overlaps;
  for (size_t w = 0; w < wanted.size(); ++w) {
    const ParameterRange& want = wanted[w];
    // The first stored range that ends behind the wanted range's beginning.
    auto next = std::partition_point(order.begin(), order.end(), [&](int64_t i) {
      const int64_t end = stored[i].begin + stored[i].numel;
      return stored[i].parameter < want.parameter ||
             (stored[i].parameter == want.parameter && end <= want.begin);
    });
    int64_t done = 0;
    while (done < want.numel) {
      const int64_t at = want.begin + done;
      TORCH_CHECK(next != order.end() && stored[*next].parameter == want.parameter &&
                      stored[*next].begin <= at,
                  "parameter ", want.parameter, ": expected element ", at,
                  " in a stored range, got none that holds it");
      const ParameterRange& have = stored[*next];
      const int64_t numel = std::min(have.begin + have.numel, want.begin + want.numel) - at;
      overlaps.push_back({*next, static_cast<int64_t>(w), at - have.begin, done, numel});
      done += numel;
      ++next;
    }
  }
  std::ranges::stable_sort(overlaps, {}, &RangeOverlap::stored);
  return overlaps;
}

}  // namespace zero
