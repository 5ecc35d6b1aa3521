// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// One rank of the jobs of silence_test: it trains, and one of the ranks is stopped or killed on the
// way. The others say what they see and how long that took.
#pragma once

#include <string>

namespace zero {

// The rank of this process's variables; rank `victim` is stopped or killed, as `how` says: "stop"
// or "kill". `where` is "start", "connect:<n>" (after the n-th access to the store of the group's
// first communicator) or "step:<n>". Returns an exit code.
int silence_rank(int timeout_ms, int victim, const std::string& how, const std::string& where);

}  // namespace zero
