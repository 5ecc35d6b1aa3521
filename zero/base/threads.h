// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Starts threads.
#pragma once

#include <c10/util/Exception.h>

#include <system_error>
#include <thread>
#include <utility>

namespace zero {

// Tests set it: start_thread() throws on this thread, as where the system has no thread left.
inline thread_local bool threads_refused = false;

// Starts a thread that runs body(). Throws c10::Error when the system has no thread left.
template <typename Body>
std::thread start_thread(Body&& body) {
  try {
    if (threads_refused) {
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    }
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    TORCH_CHECK(false, "cannot start a thread: ", error.what(),
                "; raise the limits of this process (ulimit -u, ulimit -v, pids.max)");
  }
}

}  // namespace zero
