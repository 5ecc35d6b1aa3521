// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The share of the processor that a thread gets.
#pragma once

namespace zero {

// From now on the calling thread, and threads that it starts, get about 3 % of a core on which
// another thread of this process computes, and all of an idle one. There is no way back: an
// unprivileged process cannot raise a priority. So no thread waits for one of these that has much
// to do; it does the rest itself.
void lower_thread_priority();

}  // namespace zero
