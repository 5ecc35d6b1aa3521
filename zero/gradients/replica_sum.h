// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The second half of a reduction over shards and replicas: every rank has the
// sum over its reduce group, and needs it over the replicas of that too.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "zero/communicator.h"
#include "zero/memory/buffer_pool.h"

namespace zero {

struct ReplicaShard {
  at::Tensor shard;  // [n], fp32 or bf16
  Communicator* replicas;
  std::string label;
};

// Collective over all `replicas`, blocks. Makes every shard the sum over its replicas, added up
// in fp32 and in rank order; all replicas have the same bits. Each rank exchanges and gathers
// (R-1)/R of a shard. Two shards are under way at a time, with two buffers of a shard's size each.
// Ranks that share any of the `replicas` give shards of all of them in one order, empty ones too,
// which send nothing: where a gather comes between the exchanges depends on all shards before it.
void sum_over_replicas(const std::vector<ReplicaShard>& shards, BufferPool& pool);

}  // namespace zero
