// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Throws on all ranks if one has a problem or they were given different lines. A new optimizer
// sends this first: Gloo aborts the process on a size mismatch and NCCL hangs, so nothing of a size
// that depends on the model may be sent before it.
#pragma once

#include <string>
#include <vector>

#include "zero/communicator.h"

namespace zero {

// Collective, blocks. `problem` is empty or the reason why this rank cannot go on; `lines`
// describes what must be equal, one fact a line. Throws c10::Error on every rank when a rank has a
// problem (naming it and the reason) or when lines differ (giving the first difference: rank 0's
// line as expected, and the ranks that got another one). Where only ranks that join the job are the
// reason, the others throw CommunicationError: they may go on without those. Errors name `call`, or
// construction without one.
void check_same_on_all_ranks(Communicator& communicator, const std::string& problem,
                             const std::vector<std::string>& lines, const std::string& call = {});

}  // namespace zero
