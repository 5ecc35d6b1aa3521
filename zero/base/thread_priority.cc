// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/thread_priority.h"

#include <sched.h>
#include <sys/resource.h>

namespace zero {

void lower_thread_priority() {
  // On Linux, both are a thread's. A container may forbid the first.
  const sched_param none{};
  if (sched_setscheduler(0, SCHED_IDLE, &none) != 0) setpriority(PRIO_PROCESS, 0, 19);
}

}  // namespace zero
