// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// SIGTERM and SIGINT as a request that the training loop answers between two steps: job schedulers
// send SIGTERM some time before they kill, and Ctrl-C sends SIGINT.
#pragma once

#include <chrono>

namespace zero::examples {

// The exit code of a rank that stopped although no signal reached it, because one reached another
// rank: sysexits.h calls it a failure that may be tried again. A launcher that takes 0 for the end
// of training would not restart this rank.
inline constexpr int kStoppedForAnotherRank = 75;

// From now on SIGTERM and the first SIGINT do not end this process. A SIGINT more than a second
// later does: a terminal and a launcher may both send the first one.
void watch_stop_signal();

// Returns whether one has arrived.
bool stop_requested();

// Returns the same, and waits up to `patience` for a signal that is on its way: a launcher that
// ends a job sends one to every rank, but not at the same instant.
bool stop_requested_within(std::chrono::milliseconds patience);

}  // namespace zero::examples
