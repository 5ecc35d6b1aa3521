// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Finds ranks whose parameters differ: after an edit from outside on one of them, a flipped bit in
// memory, or a bug.
#pragma once

#include <cstdint>
#include <functional>

#include "zero/communicator.h"
#include "zero/memory/parameter_table.h"
#include "zero/update/shard_optimizer.h"

namespace zero {

// Collective, blocks. Compares 64-bit hashes of every working parameter p with
// includes(p) over the ranks of `group`, and this rank's masters, unless they are split, rounded to
// the working dtype, with its part of the working parameters. Throws c10::Error on every rank that
// names the first parameter that differs and the ranks.
void check_working_parameters(const ParameterTable& table, const ShardOptimizer& shards, int rank,
                              Communicator& group, const std::function<bool(int64_t)>& includes);

}  // namespace zero
