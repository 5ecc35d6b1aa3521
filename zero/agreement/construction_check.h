// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sends the first messages of a new optimizer: all ranks learn whether any of them found its
// arguments unusable, and whether all were given the same. Gloo aborts the process on a size
// mismatch and NCCL hangs, so nothing of a size that depends on the model may be sent before this.
#pragma once

#include <string>
#include <vector>

#include "zero/communicator.h"

namespace zero {

// Collective, blocks. `problem` is empty or the reason why this rank cannot go on; `lines`
// describes what must be equal, one fact a line. Throws c10::Error on every rank when a rank has a
// problem (naming it and the reason) or when lines differ (giving the first difference: rank 0's
// line as expected, and the ranks that got another one). Where only ranks that join the job are the
// reason, the others throw CommunicationError: they may go on without those. `call` is the name of
// one that changes an optimizer as construction would make it.
void check_construction(Communicator& communicator, const std::string& problem,
                        const std::vector<std::string>& lines, const std::string& call = {});

}  // namespace zero
