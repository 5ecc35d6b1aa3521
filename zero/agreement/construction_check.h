// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The first messages of a new optimizer: all ranks learn whether any of them
// found its arguments unusable, and whether they all were given the same. Gloo
// aborts the process on a size mismatch and NCCL hangs, so nothing of a size
// that depends on the model may be sent before this.
#pragma once

#include <string>
#include <vector>

#include "zero/communicator.h"

namespace zero {

// Collective, blocks. `problem` is empty or why this rank cannot go on; `lines`
// describes what must be equal, one fact a line. Throws c10::Error on every
// rank when a rank has a problem (saying which and why) or when lines differ
// (giving the first difference: rank 0's line as expected, and who got what).
void check_construction(Communicator& communicator, const std::string& problem,
                        const std::vector<std::string>& lines);

}  // namespace zero
