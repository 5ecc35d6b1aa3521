// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How many threads can compute at a time.
#pragma once

#include <string>

namespace zero {

// Returns the number of cores that this process may run on, and no more than the quotas of its
// control groups have time for, of version 1 or 2: a thread more would have all of them stand still
// for the rest of each period. At least 1. `root` is where /proc and /sys are; tests set it.
int usable_cores(const std::string& root = {});

}  // namespace zero
