// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/fingerprint.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace zero {
namespace {

Fingerprint maxima(const std::vector<Fingerprint>& ranks) {
  Fingerprint result = ranks.front();
  for (const Fingerprint& one : ranks) {
    for (size_t i = 0; i < one.size(); ++i) result[i] = std::max(result[i], one[i]);
  }
  return result;
}

TEST(FingerprintTest, MaximaOfFingerprintsShowWhetherAllRanksAreEqual) {
  std::vector<Fingerprint> all;
  for (int n = 0; n < 64; ++n) {
    std::vector<uint8_t> flags(64, 0);
    flags[n] = 1;
    all.push_back(fingerprint_of(flags));
  }
  for (size_t a = 0; a < all.size(); ++a) {
    EXPECT_TRUE(all_equal(maxima({all[a], all[a], all[a]}).data()));
    for (size_t b = 0; b < a; ++b) {
      EXPECT_FALSE(all_equal(maxima({all[a], all[b]}).data()));
      EXPECT_FALSE(all_equal(maxima({all[b], all[a], all[a]}).data()));
    }
  }
  EXPECT_EQ(fingerprint_of(std::string("lr 0.1")), fingerprint_of(std::string("lr 0.1")));
  EXPECT_NE(fingerprint_of(std::string("lr 0.1")), fingerprint_of(std::string("lr 0.2")));
}

// Either half of a hash is enough to be different.
TEST(FingerprintTest, EachHalfOfAFingerprintCounts) {
  for (const Fingerprint& other : {Fingerprint{5, -5, 8, -8}, Fingerprint{6, -6, 7, -7}}) {
    EXPECT_FALSE(all_equal(maxima({{5, -5, 7, -7}, other}).data()));
  }
  EXPECT_TRUE(all_equal(Fingerprint{5, -5, 7, -7}.data()));
}

}  // namespace
}  // namespace zero
