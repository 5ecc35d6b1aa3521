// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What generators of random programs draw, and the names of it that a failure prints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "bookkeeping/memory.h"
#include "bookkeeping/plan.h"
#include "tests/support/training.h"

namespace zero {

template <class T>
struct Choice {
  T value;
  int weight;
};

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}
  uint64_t number() { return random_(); }
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

 private:
  std::mt19937_64 random_;
};

inline const char* name_of(Inner inner) {
  constexpr const char* kNames[] = {"SGD",     "SGD with momentum", "AdamW", "Adam",
                                    "RMSprop", "Adagrad",           "Lion",  "a class of its own",
                                    "Muon",    "Muon in fp32",      "LAMB",  "Adafactor"};
  return kNames[static_cast<size_t>(inner)];
}

inline const char* name_of(Layout layout) {
  constexpr const char* kNames[] = {"contiguous", "per parameter", "whole parameters"};
  return kNames[static_cast<size_t>(layout)];
}

inline const char* name_of(Moments moments) {
  constexpr const char* kNames[] = {"fp32 moments", "bf16 moments", "8-bit moments"};
  return kNames[static_cast<size_t>(moments)];
}

}  // namespace zero
