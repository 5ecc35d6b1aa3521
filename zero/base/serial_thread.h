// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A thread that runs tasks one after the other.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace zero {

// The thread starts with the first task, or before with start(). Thread safety: push(), start().
class SerialThread {
 public:
  // `name`, of up to 10 letters, is that of the thread.
  explicit SerialThread(const char* name = "tasks") : name_(name) {}
  // Runs all tasks to their end first.
  ~SerialThread();
  SerialThread(const SerialThread&) = delete;
  SerialThread& operator=(const SerialThread&) = delete;

  // For tasks that must not run on the thread that pushes them. Throws c10::Error when the system
  // has no thread left.
  void start();
  // `task` must not throw, nor be what keeps this object alive. It runs in this call when no thread
  // can be started.
  void push(std::function<void()> task);

 private:
  void work();

  const char* const name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace zero
