// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The norm of the averaged gradient from the flat fp32 shards: one pass over
// this rank's shards and one small message.
#pragma once

#include <vector>

#include "zero/collectives.h"
#include "zero/shard_optimizer.h"

namespace zero {

struct ShardNorm {
  double norm = 0.0;
  bool nonfinite = false;  // a value that is NaN or infinite on any rank
};

// Collective over `group`, blocks. The `norm_type`-norm (any p > 0, or infinity)
// of all segments of all ranks. `weights[g]` multiplies what parameter group g
// adds to the sum: one divided by how many ranks of `group` hold the same
// shards, so that every element counts once, or 0 where other ranks count it; not
// used for infinity nor for what is not finite.
// Sums are made in double. NaN in, NaN out, on every rank.
ShardNorm shard_norm(const std::vector<SegmentTensors>& segments,
                     const std::vector<double>& weights, double norm_type, Communicator& group);

}  // namespace zero
