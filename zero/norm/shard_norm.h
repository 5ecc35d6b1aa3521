// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Computes the norm of the averaged gradient from the flat shards, in one pass over this
// rank's shards and one small message.
#pragma once

#include <vector>

#include "zero/communicator.h"
#include "zero/memory/segment_tensors.h"

namespace zero {

// Both 0-dim double beside the gradients; not read on the host.
struct ShardNorm {
  at::Tensor norm;
  at::Tensor nonfinite;  // not 0 where a value is NaN or infinite on any rank
};

// Collective over `group`, blocks on the host. The `norm_type`-norm (any p > 0, or
// infinity) of all segments of all ranks, which are on `device`. `weights[g]` multiplies what
// parameter group g adds to the sum: one divided by how many ranks of `group` hold the same shards,
// so that every element counts once, or 0 where other ranks count it; not used for infinity nor for
// what is not finite. Sums are made in double. NaN in, NaN out, on every rank. With `bound`, 0-dim
// fp32 on `device`, it is that of the elements clamped to [-bound, bound]. Then, and where
// gradients are not fp32, elements are copied, fp32_batch_numel() at a time.
ShardNorm shard_norm(const std::vector<SegmentTensors>& segments,
                     const std::vector<double>& weights, double norm_type, at::Device device,
                     Communicator& group, const at::Tensor& bound = {});

// Collective. The same for weights of 1 and a `norm_type` of 2 or infinity, with bits that depend
// neither on the number of ranks nor on the order of segments, if each begins at a multiple of
// kernels::kExactBlock elements of its parameter: squares are added up as kernels/exact_sum.h says,
// and the limbs over ranks in double, which is exact too.
ShardNorm exact_shard_norm(const std::vector<SegmentTensors>& segments, double norm_type,
                           at::Device device, Communicator& group, const at::Tensor& bound = {});

}  // namespace zero
