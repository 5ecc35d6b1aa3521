// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// SIGTERM and SIGINT as a request that the training loop answers between two steps: job schedulers
// send SIGTERM some time before they kill, and Ctrl-C sends SIGINT.
#pragma once

namespace zero::examples {

// From now on SIGTERM and the first SIGINT do not end this process. A SIGINT more than a second
// later does: a terminal and a launcher may both send the first one.
void watch_stop_signal();

// Returns whether one has arrived.
bool stop_requested();

}  // namespace zero::examples
