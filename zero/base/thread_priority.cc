// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/thread_priority.h"

#include <sys/resource.h>

#include <algorithm>

namespace zero {

void lower_thread_priority() {
  // On Linux, the nice value is a thread's; the 15th has 36 parts of 1024.
  constexpr int kLower = 15, kLowest = 19;
  setpriority(PRIO_PROCESS, 0, std::min(getpriority(PRIO_PROCESS, 0) + kLower, kLowest));
}

}  // namespace zero
