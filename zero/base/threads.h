// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Starts threads.
#pragma once

#include <c10/util/Exception.h>

#include <pthread.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace zero {

// Tests set it: no thread can be started on this thread, as where the system has none left.
inline thread_local bool threads_refused = false;

[[noreturn]] inline void throw_no_thread(const std::string& reason) {
  TORCH_CHECK(false, "cannot start a thread: ", reason,
              "; raise the limits of this process (ulimit -u, ulimit -v, pids.max)");
}

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
    throw_no_thread(error.what());
  }
  pthread_setname_np(thread.native_handle(), (std::string("zero ") + name).c_str());
  return thread;
}

// Starts a thread that runs body() and that nobody joins; `name` and errors are those of
// start_thread(). body() must not throw.
//
// In place of start_thread(...).detach(): pthread_detach() looks at a thread once more when it has
// detached it, at least in glibc 2.36. If the caller loses its core in between, the thread may have
// ended, and another one may have its memory, which is taken for ended then: a join() or detach()
// of that one fails, or the process ends with a signal.
template <typename Body>
void start_detached_thread(Body body, const char* name = "thread") {
  struct Start {
    Body body;
    std::string name;
  };
  auto start = std::make_unique<Start>(Start{std::move(body), std::string("zero ") + name});
  const auto run = [](void* argument) noexcept -> void* {
    const std::unique_ptr<Start> own(static_cast<Start*>(argument));
    pthread_setname_np(pthread_self(), own->name.c_str());
    own->body();
    return nullptr;
  };
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  pthread_t thread{};
  const int error = threads_refused ? EAGAIN : pthread_create(&thread, &detached, run, start.get());
  pthread_attr_destroy(&detached);
  if (error != 0) throw_no_thread(std::strerror(error));
  start.release();  // to the thread
}

}  // namespace zero
