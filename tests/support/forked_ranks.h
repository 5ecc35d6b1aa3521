// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// For programs of ranks, where that each of them is started by exec is not what is tested.
#pragma once

namespace zero {

// The main() of a program that calls launch_local(): calls `program` and ends as it says. A rank
// goes on in the forked process, by a call of `program`, because libtorch is loaded there: an exec
// loads it again, which takes 0.4 s of processor time. It has the variables and descriptors that it
// would have after the exec. Sanitizers do not take a fork of a process with threads: under them it
// is an exec.
[[noreturn]] void run_with_forked_ranks(int (*program)(int, char**), int argc, char** argv);

// For a process that goes on behind a fork: closes what an exec would close.
void close_as_exec_does();

}  // namespace zero
