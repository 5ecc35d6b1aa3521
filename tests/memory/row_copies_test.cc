// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/row_copies.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace zero {
namespace {

// A parameter in pieces, cut anywhere.
std::vector<ElementRange> pieces_of(const at::Tensor& elements, std::mt19937& random) {
  std::vector<int64_t> cuts{0, elements.numel()};
  for (int i = 0; i < 4; ++i) {
    cuts.push_back(static_cast<int64_t>(random() % static_cast<unsigned>(elements.numel() + 1)));
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<ElementRange> pieces;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    // A piece of a bucket, beside others.
    const at::Tensor memory = at::full({cuts[i + 1] - cuts[i] + 5}, 777, elements.options());
    const at::Tensor piece = memory.narrow(0, 2, cuts[i + 1] - cuts[i]);
    piece.copy_(elements.slice(0, cuts[i], cuts[i + 1]));
    pieces.push_back({cuts[i], piece});
  }
  return pieces;
}

TEST(RowCopiesTest, WhateverCutsThePiecesRowsFollowTheirSources) {
  std::mt19937 random(7);
  const auto below = [&](int n) {
    return static_cast<int64_t>(random() % static_cast<unsigned>(n));
  };
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE(i);
    const int64_t columns = 1 + below(7);
    const int64_t before = 1 + below(12);
    const int64_t now = 1 + below(12);
    at::Tensor rows = at::empty({now}, at::kLong);
    for (int64_t r = 0; r < now; ++r) rows[r] = below(static_cast<int>(before) + 1) - 1;
    const at::Tensor old_elements = at::arange(before * columns).to(at::kFloat);
    at::Tensor expected = at::full({now, columns}, -1.0);
    for (int64_t r = 0; r < now; ++r) {
      const auto source = rows[r].item<int64_t>();
      if (source >= 0) expected[r].copy_(old_elements.view({before, columns})[source]);
    }
    const auto from = pieces_of(old_elements, random);
    const auto to = pieces_of(at::full({now * columns}, -1.0), random);
    for (const ElementRange& f : from) {
      for (const ElementRange& t : to) copy_rows(f, t, {rows, columns});
    }
    for (const ElementRange& t : to) {
      EXPECT_TRUE(t.values.equal(expected.view({-1}).slice(0, t.begin, t.begin + t.values.numel())))
          << t.begin;
      const at::Tensor memory = t.values.as_strided({t.values.numel() + 5}, {1}, 0);
      EXPECT_EQ(memory.eq(777).sum().item<int64_t>(), 5) << "beside the piece";
    }
  }
}

TEST(RowCopiesTest, WithoutSourcesElementsStayInTheirPlaces) {
  std::mt19937 random(8);
  const at::Tensor elements = at::arange(100).to(at::kFloat);
  const auto from = pieces_of(elements, random);
  const auto to = pieces_of(at::full({100}, -1.0), random);
  for (const ElementRange& f : from) {
    for (const ElementRange& t : to) copy_rows(f, t, {});
  }
  for (const ElementRange& t : to) {
    EXPECT_TRUE(t.values.equal(elements.slice(0, t.begin, t.begin + t.values.numel())));
  }
}

}  // namespace
}  // namespace zero
