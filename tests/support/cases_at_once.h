// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// For tests whose cases wait most of their time: for timeouts, and for ranks that do not answer.
#pragma once

namespace zero {

// The main() of such a test: runs each case in a process of its own, forked from this one, and
// `at_once` of them at any time. Prints what they have printed, case by case, when all have ended.
// Ends this process, with 0 where all pass. Each case has a TEST_TMPDIR of its own.
int run_cases_at_once(int argc, char** argv, int at_once);

}  // namespace zero
