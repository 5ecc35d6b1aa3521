// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The reduction of one packed bucket: exchange rows, sum them in rank order, add the result to the
// shard. reduction_queue.h runs it on a thread, stream_reductions.h on streams of a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "zero/comm/row_communicator.h"
#include "zero/gradients/wire_format.h"
#include "zero/memory/buffer_pool.h"

namespace zero {

// One bucket on its way.
struct BucketReduction {
  const WireFormat* wire = nullptr;  // outlives the reduction
  Rows rows;                         // as encoded by `wire`, from the pool; given back when done
  at::Tensor shard;                  // fp32 or bf16, an element for each gradient of the own row
  bool accumulate = false;           // add to the shard, or assign it
  float scale = 1.0F;                // factor after the sum
  Communicator* group = nullptr;     // null or of one rank: nothing is sent
  int64_t bucket = 0;                // for errors and traces
};

// A BucketReduction whose rows are being sent.
struct Exchange {
  BucketReduction reduction;
  at::Tensor buffer;  // from the pool; may be undefined
  Pending pending;    // its wait() adds up
};

inline bool has_peers(const BucketReduction& reduction) {
  return reduction.group != nullptr && reduction.group->world_size() > 1;
}
// Reduces a bucket without peers, on the current stream.
void reduce_alone(const BucketReduction& reduction, BufferPool& pool);
// Starts the exchange from the current stream.
Exchange start_exchange(BucketReduction reduction, BufferPool& pool);
// Waits, adds up and gives the buffers back. On a GPU the current stream does.
void finish_exchange(Exchange& exchange, BufferPool& pool);
// Ends the group for the error of this rank alone that is being handled, for want of memory
// perhaps: the peers wait for what will not be sent.
void end_group(Communicator& group);

}  // namespace zero
