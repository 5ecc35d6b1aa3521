// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A CallSequence on ranks with a ZeroOptimizer, compared with plain torch after every call.
#pragma once

#include <chrono>
#include <string>

#include "tests/training/call_sequence.h"
#include "zero/process_group.h"

namespace zero {

// On this rank of a group of sequence.world_size. Throws at the first difference and says in which
// event. Checkpoints go below `folder`, which all ranks see.
void run_sequence(const CallSequence& sequence, const Group& group, const std::string& folder);

// Bounds every wait of a rank for another, so that a hang is an exception.
inline constexpr std::chrono::milliseconds kSequenceTimeout = std::chrono::seconds(10);
// For a whole sequence: far more than any takes on a busy machine.
inline constexpr std::chrono::seconds kSequenceLimit{600};

}  // namespace zero
