// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// For programs of tests whose end is not what is tested.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <iostream>

namespace zero {

// Ends this process without what libtorch does at its end: 0.09 s of processor time, which is more
// than many a test takes.
[[noreturn]] inline void end_at_once(int status) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace zero
