// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Calls a function again and again on a thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "zero/base/own_thread_wait.h"
#include "zero/base/threads.h"

namespace zero {

class PeriodicCall {
 public:
  // `call` must not throw, nor end this object. `name` is a string literal. Throws c10::Error when
  // the system has no thread left.
  PeriodicCall(std::chrono::milliseconds period, const char* name, std::function<void()> call)
      : name_(name),
        thread_(start_thread(
            [this, period, call = std::move(call)] {
              std::unique_lock<std::mutex> lock(mutex_);
              while (!changed_.wait_for(lock, period, [this] { return stop_; })) {
                lock.unlock();
                call();
                lock.lock();
              }
            },
            name)) {}
  // Waits for a call under way.
  ~PeriodicCall() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    join_own_thread(thread_, c10::str("its thread \"zero ", name_, "\""));
  }
  PeriodicCall(const PeriodicCall&) = delete;
  PeriodicCall& operator=(const PeriodicCall&) = delete;

 private:
  const char* const name_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace zero
