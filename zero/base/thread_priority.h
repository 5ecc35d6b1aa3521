// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The share of the processor that a thread gets.
#pragma once

namespace zero {

// From now on the calling thread, and threads that it starts, run where a core is idle, and leave
// it at once when another thread wakes up there: one that waits for messages many times in a step
// would otherwise lose a slice of some milliseconds each time. On cores that compute without a
// pause they get almost nothing. There may be no way back: an unprivileged process cannot raise a
// priority. So no thread waits for one of these that has much to do; it does the rest itself.
void lower_thread_priority();

}  // namespace zero
