// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A function that makes numbers which look random of a seed and counters, in no order:
//
//   uint64_t value = mix(mix(mix(seed) ^ step) ^ place);
#pragma once

#include <cstdint>

namespace zero::examples {

// Mixes all bits of `x`: the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast
// Splittable Pseudorandom Number Generators", 2014).
constexpr uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace zero::examples
