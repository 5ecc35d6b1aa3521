// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace zero {

template <class T>
struct Choice {
  T value;
  int weight;
};

// What generators of random programs draw.
class Draws {
 protected:
  explicit Draws(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool percent(int64_t n) { return below(100) < n; }
  template <class T>
  T pick(const std::vector<Choice<T>>& choices) {
    int64_t total = 0;
    for (const auto& c : choices) total += c.weight;
    int64_t left = below(total);
    for (const auto& c : choices) {
      if ((left -= c.weight) < 0) return c.value;
    }
    return choices.back().value;
  }

  std::mt19937_64 random_;
};

}  // namespace zero
