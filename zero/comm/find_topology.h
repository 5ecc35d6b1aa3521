// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Finds which ranks share a machine.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "zero/process_group.h"
#include "zero/rendezvous/bounded_store.h"

namespace zero {

// Collective; `store` is for this call alone. Returns the same on all ranks: `stated`, which all
// ranks must have equal, or the machines that it finds. Ranks share a machine if each of them can
// read the shared memory of all others; a rank that is not `willing` shares none. Throws c10::Error
// when ranks state different topologies, and within `timeout`, counted from `since`, and a second
// when a rank does not take part, or once its launcher has seen one of `watched` end, which are
// numbers in the job.
Topology agree_on_topology(const c10::intrusive_ptr<BoundedStore>& store, int rank, int world_size,
                           std::chrono::milliseconds timeout,
                           std::chrono::steady_clock::time_point since,
                           const std::optional<Topology>& stated, bool willing,
                           std::vector<int> watched = {});

// Returns what to change so that ranks of a machine can share memory, or that exchanges can work in
// two levels; empty if they do, or if there is nothing to gain. `local_world_size` is how many
// ranks the launcher has started on this machine; 0 if that is not known, or if they are to share
// nothing. `over_nccl`: whether gradients and parameters go over NCCL.
std::string advice(const Topology& topology, int local_world_size, bool over_nccl = false);

}  // namespace zero
