// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Whether all ranks of a mesh were given groups that fit together.
#pragma once

#include "zero/agreement/shard_domains.h"
#include "zero/communicator.h"

namespace zero {

// Collective over the mesh, whose `control` is. Throws on every rank of it where the ranks of a
// group have not that group as the same domain, or as home, for which others would wait; where
// replicas have different places in their groups, and hold different shards; where ranks of one
// group have copies in different ones, and average over different ranks; and where they are
// different ones of the copies, and begin with different values.
void check_groups(Communicator& control, const ShardDomains& all);

}  // namespace zero
