// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/serial_thread.h"

#include <chrono>
#include <utility>

#include "zero/base/own_thread_wait.h"
#include "zero/base/threads.h"

namespace zero {
namespace {

constexpr std::chrono::seconds kWakeUpSlack{1};  // A lost wake-up costs so much.

}  // namespace

SerialThread::~SerialThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) join_own_thread(thread_, c10::str("its thread \"zero ", name_, "\""));
}

void SerialThread::start() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread([this] { work(); }, name_);
}

void SerialThread::push(std::function<void()> task) {
  try {
    start();
  } catch (const c10::Error&) {
    task();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void SerialThread::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const auto called = [this] { return stop_ || !tasks_.empty(); };
    while (!changed_.wait_for(lock, kWakeUpSlack, called)) {
    }
    if (tasks_.empty()) return;
    std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
  }
}

}  // namespace zero
