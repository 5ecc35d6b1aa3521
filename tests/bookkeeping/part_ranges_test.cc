// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs between parts of one tensor, against a walk over all elements.
#include "bookkeeping/part_ranges.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zero {
namespace {

int64_t numel(const TensorBox& box) {
  int64_t result = 1;
  for (const int64_t size : box.sizes) result *= size;
  return result;
}

// The number in the whole, of sizes `whole`, of each element of a box.
std::vector<int64_t> numbers(const TensorBox& box, const std::vector<int64_t>& whole) {
  std::vector<int64_t> result(numel(box));
  for (int64_t i = 0; i < numel(box); ++i) {
    int64_t rest = i;
    int64_t factor = 1;
    for (size_t d = whole.size(); d-- > 0;) {
      result[i] += (rest % box.sizes[d] + box.from[d]) * factor;
      rest /= box.sizes[d];
      factor *= whole[d];
    }
  }
  return result;
}

// `whole` cut into `parts` along `dimension`, as evenly as it can be.
std::vector<TensorBox> cut(const std::vector<int64_t>& whole, size_t dimension, int64_t parts) {
  std::vector<TensorBox> result;
  int64_t from = 0;
  for (int64_t p = 0; p < parts; ++p) {
    TensorBox box{std::vector<int64_t>(whole.size(), 0), whole};
    box.from[dimension] = from;
    box.sizes[dimension] = whole[dimension] / parts + (p < whole[dimension] % parts ? 1 : 0);
    from += box.sizes[dimension];
    result.push_back(box);
  }
  return result;
}

void expect_right(const TensorBox& wanted, const std::vector<TensorBox>& stored,
                  const std::vector<int64_t>& whole) {
  const std::vector<int64_t> expected = numbers(wanted, whole);
  std::vector<std::vector<int64_t>> there;
  for (const TensorBox& s : stored) there.push_back(numbers(s, whole));
  for (int64_t begin = 0; begin <= numel(wanted); ++begin) {
    for (int64_t end = begin; end <= numel(wanted); ++end) {
      std::vector<int64_t> got;
      for (const PartRange& range : part_ranges(wanted, begin, end - begin, stored)) {
        for (int64_t i = 0; i < range.numel; ++i)
          got.push_back(there[range.stored].at(range.begin + i));
      }
      ASSERT_EQ(got, std::vector<int64_t>(expected.begin() + begin, expected.begin() + end));
    }
  }
}

TEST(PartRangesTest, EveryRangeOfEveryPartIsFoundInPartsOfAnyOtherCut) {
  int pairs = 0;
  for (const std::vector<int64_t>& whole :
       {std::vector<int64_t>{7}, std::vector<int64_t>{4, 6}, std::vector<int64_t>{3, 4, 2}}) {
    for (size_t a = 0; a < whole.size(); ++a) {
      for (size_t b = 0; b < whole.size(); ++b) {
        for (const int64_t n : {1, 2, 3, 4}) {
          for (const int64_t m : {1, 2, 4}) {
            const std::vector<TensorBox> stored = cut(whole, b, m);
            for (const TensorBox& wanted : cut(whole, a, n)) expect_right(wanted, stored, whole);
            ++pairs;
          }
        }
      }
    }
  }
  EXPECT_EQ(pairs, (1 + 4 + 9) * 12);
}

// The sections {2, 4, 6} of a dimension of 12, each cut into `parts`.
std::vector<TensorPart> cut_fused(const std::vector<int64_t>& whole, size_t dimension,
                                  int64_t parts) {
  std::vector<TensorPart> result(static_cast<size_t>(parts));
  for (int64_t p = 0; p < parts; ++p) {
    TensorPart& part = result[static_cast<size_t>(p)];
    part.along = dimension;
    int64_t begin = 0;
    for (const int64_t section : {2, 4, 6}) {
      TensorBox box{std::vector<int64_t>(whole.size(), 0), whole};
      box.sizes[dimension] = section / parts;
      box.from[dimension] = begin + p * (section / parts);
      part.boxes.push_back(box);
      begin += section;
    }
  }
  return result;
}

// The numbers of the elements of a part, in its memory order.
std::vector<int64_t> numbers(const TensorPart& part, const std::vector<int64_t>& whole) {
  int64_t rows = 1;  // of the part
  for (size_t d = 0; d < part.along; ++d) rows *= whole[d];
  std::vector<int64_t> result;
  for (int64_t row = 0; row < rows; ++row) {
    for (const TensorBox& box : part.boxes) {
      const std::vector<int64_t> all = numbers(box, whole);
      const auto length = static_cast<int64_t>(all.size()) / rows;
      result.insert(result.end(), all.begin() + row * length, all.begin() + (row + 1) * length);
    }
  }
  return result;
}

TEST(PartRangesTest, FusedPartsAreFoundInPartsOfAnyOtherCut) {
  for (const std::vector<int64_t>& whole :
       {std::vector<int64_t>{12}, std::vector<int64_t>{12, 2}, std::vector<int64_t>{2, 12},
        std::vector<int64_t>{2, 12, 2}}) {
    const size_t fused = whole[0] == 12 ? 0 : 1;
    std::vector<std::vector<TensorPart>> cuts;
    for (const int64_t parts : {1, 2}) cuts.push_back(cut_fused(whole, fused, parts));
    for (size_t d = 0; d < whole.size(); ++d) {  // not fused
      for (const int64_t parts : {1, 2}) {
        cuts.emplace_back();
        for (const TensorBox& box : cut(whole, d, parts)) cuts.back().push_back({{box}, d});
      }
    }
    for (const auto& stored : cuts) {
      std::vector<std::vector<int64_t>> there;
      for (const TensorPart& s : stored) there.push_back(numbers(s, whole));
      for (const auto& parts : cuts) {
        for (const TensorPart& wanted : parts) {
          const std::vector<int64_t> expected = numbers(wanted, whole);
          const auto size = static_cast<int64_t>(expected.size());
          for (int64_t begin = 0; begin <= size; ++begin) {
            for (int64_t end = begin; end <= size; ++end) {
              std::vector<int64_t> got;
              for (const PartRange& range : part_ranges(wanted, begin, end - begin, stored)) {
                for (int64_t i = 0; i < range.numel; ++i) {
                  got.push_back(there[range.stored].at(range.begin + i));
                }
              }
              ASSERT_EQ(got,
                        std::vector<int64_t>(expected.begin() + begin, expected.begin() + end));
            }
          }
        }
      }
    }
  }
}

TEST(PartRangesTest, AnUncutTensorIsOneRange) {
  const std::vector<TensorBox> whole = cut({4, 6}, 0, 1);
  const auto ranges = part_ranges(whole[0], 5, 13, whole);
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].begin, 5);
  EXPECT_EQ(ranges[0].numel, 13);
}

TEST(PartRangesTest, AScalarIsOneRange) {
  const TensorBox scalar;
  EXPECT_EQ(part_ranges(scalar, 0, 1, std::vector{scalar}).size(), 1u);
  const TensorPart part{{scalar}};
  EXPECT_EQ(part_ranges(part, 0, 1, std::vector{part}).size(), 1u);
}

TEST(PartRangesTest, HolesAndOverlapsAreRefused) {
  std::vector<TensorBox> stored = cut({4, 6}, 1, 3);
  const TensorBox whole = cut({4, 6}, 0, 1)[0];
  stored.pop_back();
  EXPECT_THROW(part_ranges(whole, 0, 24, stored), c10::Error);
  EXPECT_NO_THROW(part_ranges(whole, 6, 4, stored));
  stored.push_back(stored[0]);
  EXPECT_THROW(part_ranges(whole, 6, 2, stored), c10::Error);
}

}  // namespace
}  // namespace zero
