// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Prints one line to stderr when a wait is long, so that a job that stands still names the rank it
// waits for.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace zero {

// "90 s", "10 min", "1500 ms".
std::string duration_text(std::chrono::milliseconds duration);

// Marks that this thread waits while the object lives. After slow_wait_after() it prints
// "zero: <text()>", once.
// text() runs on another thread and must not block. Costs two locks; one thread per process, which
// starts with the first, looks at all of them once a second or more often: then it calls `look`, if
// there is one. That call may end after the object, so `look` owns what it uses.
class SlowWait {
 public:
  explicit SlowWait(std::function<std::string()> text, std::function<void()> look = {});
  ~SlowWait();
  SlowWait(const SlowWait&) = delete;
  SlowWait& operator=(const SlowWait&) = delete;

 private:
  friend struct SlowWaits;
  const std::function<std::string()> text_;
  const std::function<void()> look_;
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  bool printed_ = false;
  SlowWait* previous_ = nullptr;  // In the list of all.
  SlowWait* next_ = nullptr;
};

// How long a wait may be before its line: 10 s. Tests set less.
std::chrono::milliseconds slow_wait_after();
void set_slow_wait_after(std::chrono::milliseconds duration);

// Prints "zero: <text>" and a newline to stderr, by a thread of its own, for which the caller waits
// a second at most: a terminal that is paused or a pipe that nobody reads stops no wait. Once a
// line has stood so long, the callers of others do not wait. 16 may stand; further ones are
// dropped.
void print_slow_wait(const std::string& text);

}  // namespace zero
