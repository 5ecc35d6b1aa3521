// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The choice of owners in Layout::kWholeParameters, for optimizers that need whole parameters, such
// as Muon, LAMB and Adafactor. Pure arithmetic on sizes and costs.
//
// Two loads are balanced over ranks at once: elements, which are memory for masters and state, and
// cost, which is the time of a step. Over a domain, the largest parameters go first, each to the
// rank whose greater load is the least, both as parts of their sum (longest processing time: R. L.
// Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Then, bucket by bucket, parameters
// of equal size and cost swap owners, so that the rows of a bucket become about equally long. Loads
// are not changed by that.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "bookkeeping/plan.h"

namespace zero {

// The loads that a parameter adds to its owner.
struct ParameterLoad {
  int64_t numel = 0;
  int64_t cost = 0;

  friend bool operator==(const ParameterLoad&, const ParameterLoad&) = default;
};

// The load of one parameter: its elements up to the alignment, and its cost, by default the same.
// An empty parameter has no load.
ParameterLoad load_of(const ParameterInfo& info);

// Returns the cost of a step of Muon over a matrix, in multiply-adds of one product of a square:
// with s = min(m, n) and l = max(m, n), s^2 * (15 l + 9 s) / 24, and from l = 2 s on, where two
// iterations are done at a time, s^2 * (10 l + 17 s) / 24. Measured on a CPU for sides of 384 and
// 768, within 5 %. Throws c10::Error for a negative size or a cost of 2^62 or more.
int64_t newton_schulz_cost(int64_t rows, int64_t columns);

// Returns an owner for each parameter. Of equal parameters the first is given away first; of ranks
// with equal loads, one on the machine with the least load is taken, then the lowest. Ranks [m * n,
// (m + 1) * n) share machine m for n = ranks_per_machine. Throws c10::Error when costs add up to
// 2^62 or more.
//
// With T the sum of a load over all parameters, p its largest and W = world_size, the largest load
// of a rank over the mean is at most 1 + (W - 1) * p / T where cost is proportional to numel, and
// 2 + W * p / T where it is not, p / T being the larger of both.
std::vector<int64_t> assign_owners(c10::ArrayRef<ParameterLoad> parameters, int64_t world_size,
                                   int64_t ranks_per_machine);

}  // namespace zero
