// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The steps of an all-reduce by recursive doubling, which takes log2(W) messages a rank.
// Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication
// Operations in MPICH", 2005.
#pragma once

#include <vector>

namespace zero {

// What a rank does in one step, with one other rank.
struct DoublingStep {
  int peer;
  int tag;        // the same on both ranks; different for every step between them
  bool sends;     // what it knows
  bool receives;  // what the peer knows
  bool combines;  // both; else what is received takes the place of the own
};

// Tags are below this.
inline constexpr int kDoublingTags = 34;

// Returns the steps of `rank` in their order. Ranks beyond the largest power of two hand their
// values to one below it first, and get the result from it last. Both ranks of a step combine the
// same two values, so that all ranks get the same bits.
inline std::vector<DoublingStep> doubling_steps(int rank, int world_size) {
  constexpr int kFirst = 0;
  constexpr int kLast = 1;
  int power = 1;
  while (2 * power <= world_size) power *= 2;
  if (rank >= power) {
    return {{rank - power, kFirst, true, false, false}, {rank - power, kLast, false, true, false}};
  }
  std::vector<DoublingStep> steps;
  const bool folds = rank + power < world_size;
  if (folds) steps.push_back({rank + power, kFirst, false, true, true});
  int tag = kLast;
  for (int bit = 1; bit < power; bit *= 2) steps.push_back({rank ^ bit, ++tag, true, true, true});
  if (folds) steps.push_back({rank + power, kLast, true, false, false});
  return steps;
}

}  // namespace zero
