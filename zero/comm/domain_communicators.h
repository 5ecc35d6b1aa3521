// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The communicators of one domain of the plan.
#pragma once

#include <cstdint>

#include "zero/communicator.h"

namespace zero {

struct DomainCommunicators {
  Communicator* data = nullptr;      // over the ranks that share the shards
  Communicator* replicas = nullptr;  // null, or over the ranks that hold copies of this shard
  int64_t averaged_over = 0;         // divides sums of gradients; 0: the number of all these ranks
};

}  // namespace zero
