// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Starts threads.
#pragma once

#include <c10/util/Exception.h>

#include <pthread.h>

#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace zero {

// Tests set it: start_thread() throws on this thread, as where the system has no thread left.
inline thread_local bool threads_refused = false;

// Starts a thread that runs body(). `name`, of up to 10 letters, says in /proc and in debuggers
// what it is for. Throws c10::Error when the system has no thread left.
template <typename Body>
std::thread start_thread(Body&& body, const char* name = "thread") {
  std::thread thread;
  try {
    if (threads_refused) {
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    }
    thread = std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    TORCH_CHECK(false, "cannot start a thread: ", error.what(),
                "; raise the limits of this process (ulimit -u, ulimit -v, pids.max)");
  }
  pthread_setname_np(thread.native_handle(), (std::string("zero ") + name).c_str());
  return thread;
}

}  // namespace zero
