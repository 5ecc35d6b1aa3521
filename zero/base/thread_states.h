// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What the threads of this process do, for the report of a wait that should have ended.
#pragma once

#include <string>

namespace zero {

// Returns a line for each thread: its number and name, its state, the function of the kernel in
// which it waits and the system call that it is in, and the processor time that it has used. What
// /proc does not say is left out.
std::string thread_states();

}  // namespace zero
