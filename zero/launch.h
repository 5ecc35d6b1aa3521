// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Ranks on this machine without a launcher: a program that calls launch_local()
// first thing in main() starts itself as many times as its options say.
//
//   int main(int argc, char** argv) {
//     const int ranks = parse(argc, argv);               // for example --ranks 4
//     return zero::launch_local(ranks, [&] {
//       zero::Group group = zero::init_process_group();
//       return train(group);
//     });
//   }
//
// The same binary also works under torchrun, mpirun and srun: they have started
// one process per rank already, so launch_local() only calls the body.
#pragma once

#include <chrono>
#include <functional>

namespace zero {

// How launch_local() starts ranks, and what it does when one fails.
struct LaunchOptions {
  // Put "[rank] " before every line that a rank prints, and never mix two lines. A line also ends
  // with a carriage return, as progress bars write them, and after 64 KiB.
  bool prefix_lines = false;
  // For ZeroOptimizer::recover(): when a rank fails, the others go on, and the job has succeeded if
  // any of them returned 0.
  bool survivors_go_on = false;
  // With survivors_go_on: in place of the first so many ranks that fail, processes are started that
  // join the job (Group::joins()). They are numbered on from the number of ranks.
  int replacements = 0;
  // How long ranks may take to end by themselves after SIGTERM, before SIGKILL, once one of them
  // has failed.
  std::chrono::milliseconds grace = std::chrono::seconds(10);
  // The same after a signal to the parent, or a Ctrl-C at its terminal: long enough for a step and
  // a save, where ranks save then.
  std::chrono::milliseconds signal_grace = std::chrono::seconds(10);
};

// Returns the exit code for main().
//
// In a process that a launcher has started as one of several ranks (RANK is set, or mpirun's or
// srun's variables say so), and for ranks == 1: calls body() here. What it throws is printed to
// stderr, and 1 returned. If the launcher has started this process alone (WORLD_SIZE=1) and `ranks`
// is above 1, a line on stderr says that no others are started.
//
// Otherwise this process becomes the parent of `ranks` processes and does not call body():
//   - Each child runs this same program with the same arguments, by fork and exec, so that it
//     inherits no thread, lock or random state. It reaches the same call of launch_local(), with
//     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
//     TORCHELASTIC_RUN_ID set as torchrun sets them. Code of main() before that call runs in the
//     parent and in every child.
//   - The parent serves the key-value store, on a port of 127.0.0.1 that the system chose, so that
//     jobs cannot collide and other machines cannot reach it (docs/security.md). Children find
//     TORCHELASTIC_USE_AGENT_STORE=True.
//   - OMP_NUM_THREADS is the number of usable cores divided by `ranks`, unless it is set: ranks
//     with a thread for every core each would only wait for each other. Usable are the cores of
//     this process's affinity, as far as the quota of its control groups (cpu.max) has time for
//     them.
//   - SIGINT, SIGTERM and SIGHUP are passed on, unless SIGHUP is ignored as under nohup. Ctrl-C at
//     a terminal is not, since the ranks get it from there. After each of them, ranks that still
//     run after options.signal_grace are killed, and none is replaced. When a rank fails, the
//     others get SIGTERM, and SIGKILL after options.grace: they would wait for it in vain. If the
//     parent dies, the children are killed.
//     With options.survivors_go_on they get no signal, and the store is served until the last ends.
//     A replacement has ZERO_JOIN=1, a RANK of its own, a WORLD_SIZE one above it, and the
//     LOCAL_RANK, so the GPU, of the rank that it replaces.
//   - Returns 0 when all ranks returned 0, otherwise the exit code of the rank that failed first,
//     or 128 + the number of the signal that ended it. Says on stderr which rank that was.
//
// Throws c10::Error when ranks < 1, for replacements without survivors_go_on, and when processes
// cannot be started, also for too few file descriptors (`ulimit -n`) or memory. Call it once per
// process, before threads exist, and not from two threads: it handles the signals above, and
// SIGCHLD, while it waits.
int launch_local(int ranks, const std::function<int()>& body, const LaunchOptions& options = {});

}  // namespace zero
